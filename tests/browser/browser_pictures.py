"""README's picture, made again: ``python tests/browser/browser_pictures.py [FOLDER]``.

With a folder it takes every page at 1400 and 420 px, light and dark, for a person to look at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from browser_installed import chromium
from browser_runs import ROOT, finding, page_of, race
from playwright.sync_api import sync_playwright

PICTURE = ROOT / "docs/timeline.png"


def main(folder: Path | None) -> None:
    """Take the pictures."""
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        pages = {"race": race()} if folder is None else {"race": race(), "finding": finding()}
        for name, trace in pages.items():
            address = page_of(trace, Path(work))
            if folder is None:
                _take(browser, address, PICTURE, 1400, 560, "light")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            for width, height in ((1400, 700), (420, 800)):
                for scheme in ("light", "dark"):
                    _take(browser, address, folder / f"{name}-{width}-{scheme}.png", width, height, scheme)
        browser.close()


def _take(browser: Any, address: str, path: Path, width: int, height: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.screenshot(path=path)
    context.close()
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
