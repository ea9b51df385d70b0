"""The timeline in a browser: the failing step and its cause are in view, nothing is cut off, every key works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser_runs import RACE, ROOT, Opens, finding, page_of, race

from scripted.api import run_script
from scripted.report.timeline import render_timeline
from scripted.report.trace import Trace

# The elements whose text is cut off: wider than their box, or higher than the lines that they show. A line of a script
# may be as long as it likes, and ends in an ellipsis.
CUT = """() => [...document.querySelectorAll(".box i, .box i span, .chip:not(.note) > span, .lane, .step")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 2)
  .map((one) => one.textContent)"""
# How far the nearest column begins from the edge of the labels, or the whole timeline does.
BESIDE_LABELS = """() => {
  const box = (one) => one.getBoundingClientRect(), edge = box(document.querySelector(".labels")).right;
  return Math.min(...[...document.querySelectorAll(".step")].map((one) => Math.abs(box(one).left - edge)));
}"""
# Whether all of an element can be seen: inside the window, and not under the sticky labels of the lanes.
SEEN = """(one) => {
  const box = one.getBoundingClientRect(), labels = document.querySelector(".labels").getBoundingClientRect();
  const side = document.getElementById("states").getBoundingClientRect();
  const right = side.left > labels.right ? side.left : innerWidth;
  const inside = one.closest("#states");
  return box.width > 0 && box.top >= 0 && box.bottom <= innerHeight + 1
    && (inside || (box.left >= labels.right - 1 && box.right <= right + 1));
}"""

# The boxes and chips of the failed step that are hidden below the window's end, or under the details that lie over it.
HIDDEN = """() => {
  const details = document.getElementById("states"), fixed = getComputedStyle(details).position === "fixed";
  const end = fixed ? details.getBoundingClientRect().top : innerHeight;
  const x = document.querySelector(".step.failed").dataset.x;
  const of = [...document.querySelectorAll(".box, .chip")].filter((one) => one.style.getPropertyValue("--x") === x);
  return of.length ? of.filter((one) => one.getBoundingClientRect().bottom > end).map((one) => one.title) : ["none"];
}"""


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {"race": race(), "finding": finding()}


def shown_step(page: Any) -> str:
    return str(page.locator(".step.here").first.inner_text())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize(("run", "step", "cause"), [("race", "7", "FLUSH"), ("finding", "3", "flush")])
def test_the_page_opens_at_the_failure_with_its_cause_in_view(
    opened: Opens, traces: dict[str, Trace], tmp_path: Path, run: str, step: str, cause: str, width: int, scheme: str
) -> None:
    page = opened(page_of(traces[run], tmp_path), width=width, height=800, scheme=scheme)
    assert shown_step(page) == step
    assert page.locator(".step.failed").evaluate(SEEN)
    assert page.evaluate(HIDDEN) == [], "the boxes of the failed step are in view with its details"
    pane = page.locator("#states article:not([hidden])").first
    assert "failed" in pane.inner_text()
    led_here = pane.locator("dd span", has_text=cause).first
    assert led_here.evaluate(SEEN), "what led to the failure stands in the details"
    own, copy = page.locator(".chip", has_text=cause).first, page.locator(".brought > span", has_text=cause)
    assert own.evaluate(SEEN) or copy.evaluate(SEEN), "the cause stands in the timeline, without a tap"
    if width == 1400:
        assert own.evaluate(SEEN)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CUT) == []
    assert page.evaluate(BESIDE_LABELS) < 2, "no box is cut by the labels of the lanes"
    if width == 420:
        assert not page.locator(".callout").is_visible(), "its text stands in the details, and would be cut here"


def test_every_key_does_what_the_legend_says(opened: Opens, traces: dict[str, Trace], tmp_path: Path) -> None:
    page = opened(page_of(traces["race"], tmp_path))
    moves = [
        ("Home", "1"),
        ("ArrowRight", "2"),
        ("End", "7"),
        ("ArrowLeft", "6"),
        ("f", "7"),
        ("Home", "1"),
        ("w", "2"),
    ]
    for key, step in moves:
        page.keyboard.press(key)
        assert shown_step(page) == step, key
    page.keyboard.press("/")
    page.keyboard.type("flush")
    assert "of" in page.locator("#found").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    assert not page.locator("#states").is_visible()
    page.keyboard.press("p")
    page.keyboard.press("r")
    assert page.evaluate("document.activeElement.id") == "only"
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    assert page.url.endswith("#7"), "the address says what is shown"


def test_a_comparison_opens_where_the_runs_part(opened: Opens, traces: dict[str, Trace], tmp_path: Path) -> None:
    healthy = run_script(str(ROOT / RACE), tier="sim").trace
    assert healthy is not None
    path = tmp_path / "both.html"
    path.write_text(render_timeline([healthy, traces["race"]]), encoding="utf-8")
    page = opened(path.as_uri())
    assert shown_step(page) == "3"
    page.keyboard.press("f")
    assert shown_step(page) == "7"
    assert page.locator(".step.failed").evaluate(SEEN)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
