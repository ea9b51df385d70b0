"""A real browser for the two pages that people look at: any error of the console or the page fails a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser_installed import chromium, missing
from browser_runs import Opens


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if lacking := missing():
        pytest.skip(f"not installed: {' and '.join(lacking)}; `make browser` installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opens]:
    """Open an address at a width in a colour scheme."""
    errors: list[str] = []
    contexts = []

    def open_page(address: str, *, width: int = 1400, height: int = 900, scheme: str = "light") -> Any:
        # Without motion a scroll has ended when it begins.
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not errors
