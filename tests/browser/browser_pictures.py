"""README's picture, made again: ``python tests/browser/browser_pictures.py [FOLDER]``.

With a folder it takes the timeline and the debugger at 1400 and 420 px, light and dark, for a person to look at.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser_installed import chromium, missing
from browser_runs import BUG, DEATH, ROOT, finding, give, page_of, race, session

PICTURE = ROOT / "docs/timeline.png"
SIZES = ((1400, 700), (420, 800))


def main() -> None:
    """Take README's picture, or all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where all pictures go; default: README's picture alone")
    folder = parser.parse_args().folder
    if lacking := missing():
        sys.exit(f"pictures need {' and '.join(lacking)}; `make browser` installs them")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        if folder is None:
            _take(browser, page_of(race(), Path(work)), PICTURE, (1400, 560), "light")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for name, trace in {"race": race(), "finding": finding()}.items():
                _take_all(browser, page_of(trace, Path(work)), folder, name)
            with session("--pp-size", "4", "--mutant", BUG) as address:
                _type(browser, address)
                _take_all(browser, address, folder, "debugger")
        browser.close()


def _type(browser: Any, address: str) -> None:
    """Lead the debugger to the death of the race."""
    page = browser.new_page()
    page.goto(address)
    page.locator("#line:enabled").wait_for()
    for line in DEATH:
        give(page, line)
    page.close()


def _take_all(browser: Any, address: str, folder: Path, name: str) -> None:
    for size in SIZES:
        for scheme in ("light", "dark"):
            _take(browser, address, folder / f"{name}-{size[0]}-{scheme}.png", size, scheme)


def _take(browser: Any, address: str, path: Path, size: tuple[int, int], scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(address)
    if page.locator("#timeline").evaluate("(one) => one.tagName") == "IFRAME":
        page.frame_locator("#timeline").locator(".box").first.wait_for()
    page.screenshot(path=path)
    context.close()
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
