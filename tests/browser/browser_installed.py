"""The requirements of the tests in a browser, and whether they are installed.

Run by itself it says loudly that they were left out; with ``--install`` it lets playwright fetch a browser.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of an installed Chromium; None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def has_fetched() -> bool:
    """Whether playwright has fetched a browser of its own."""
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", "~/.cache/ms-playwright")).expanduser()
    return any(folder.glob("chromium*"))


def missing() -> list[str]:
    """The programs and packages that are not there."""
    parts = [] if chromium() or has_fetched() else [f"a browser ({', '.join(NAMES[:3])})"]
    return parts + ([] if importlib.util.find_spec("playwright") else ["the package playwright"])


def install() -> int:
    """Let playwright fetch a browser where there is none; the status."""
    if chromium() or has_fetched():
        return 0
    status = subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False).returncode
    if status:
        sys.stderr.write("no browser could be fetched; install one, such as `apt-get install chromium`\n")
    return status


def main() -> int:
    """Install the requirements, or say which are missing; the status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="let playwright fetch a browser where there is none")
    if parser.parse_args().install:
        return install()
    if lacking := missing():
        sys.stdout.write(
            "\n!!! LEFT OUT: the timeline and the debugger in a real browser, for want of "
            f"{' and '.join(lacking)}.\n!!! `make browser` installs what they need and runs them.\n\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
