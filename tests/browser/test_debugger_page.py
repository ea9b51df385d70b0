"""The debugger in a browser: it suggests what fits the scheduler, runs what is pressed, and shows the timeline."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser_runs import BUG, DEATH, YOURS, Opens, give, session

expect = pytest.importorskip("playwright.sync_api", reason="`make browser` installs it").expect


def told(page: Any, line: str) -> None:
    """Wait until the session has run a line and waits for the next one."""
    expect(page.locator("#log b").last).to_have_text(f"> {line}\n")
    expect(page.locator("#send")).to_be_enabled()


@pytest.mark.parametrize(
    ("options", "start"), [((), "start prompt_len=125"), (("--adapter", YOURS), "start prompt_len=17")]
)
def test_the_suggested_commands_bring_a_launch_in_flight(opened: Opens, options: tuple[str, ...], start: str) -> None:
    with session(*options) as address:
        page = opened(address)
        suggested = page.locator("#log button")
        expect(suggested.first).to_contain_text(start)
        for number in range(2):
            line = suggested.nth(number).inner_text()
            suggested.nth(number).click()
            told(page, line)
        expect(page.locator("#state")).to_contain_text(re.compile(r"#\d prefill of r1"))
        expect(page.locator("#log .refused")).to_have_count(0)
        expect(page.frame_locator("#timeline").locator(".box.stage").first).to_be_visible()
        page.fill("#line", "quit")
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_have_text("ended")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_a_death_is_in_view_and_nothing_scrolls_sideways(opened: Opens, width: int, scheme: str) -> None:
    with session("--pp-size", "4", "--mutant", BUG) as address:
        page = opened(address, width=width, scheme=scheme)
        expect(page.locator("#prompt")).to_have_text("step 0>")
        for line in DEATH:
            give(page, line)
        expect(page.locator("#prompt")).to_have_text("dead>")
        failed = page.frame_locator("#timeline").locator(".step.failed")
        expect(failed).to_be_in_viewport(ratio=0.9)
        taken = page.frame_locator("#timeline").locator(".chip.taken", has_text="#0 (chunk)")
        expect(taken).to_be_in_viewport(ratio=0.9)
        cause = page.frame_locator("#timeline").locator(".led" if width == 420 else ".chip", has_text="FLUSH")
        expect(cause.first).to_be_in_viewport(ratio=0.9)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("button", name="undo", exact=True).click()
        expect(page.locator("#prompt")).to_have_text("step 2>")
        expect(page.locator("#line")).to_be_focused()
        # Before the session ends: the page still asks for its timeline.
        page.close()
