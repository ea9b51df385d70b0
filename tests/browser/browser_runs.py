"""The runs that are looked at: the race of README, and a finding on the example of a scheduler with an adapter."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted.api import replay, run_script
from scripted.report.timeline import render_timeline
from scripted.report.trace import Trace

# The fixture ``opened``: an address, a width, a height and a colour scheme to a page of the browser.
Opens = Callable[..., Any]
ROOT = Path(__file__).parents[2]
RACE = "tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight"
BUG = "flush-ignores-in-flight"
YOURS = "examples/your_scheduler/adapter.py"
# The race typed into the debugger.
DEATH = ("start prompt_len=125 max_new_tokens=2", "step 2", "flush", "step 9")
FINDING = f"adapter={YOURS}; 1 start a prompt=4 new=1; 2 abort a; 2 flush; 3 start b prompt=5 new=1"


def race() -> Trace:
    """README's race with the bug, as ``scripted run --trace`` writes it."""
    trace = run_script(str(ROOT / RACE), tier="sim", mutant=BUG).trace
    assert trace is not None
    return trace


def finding() -> Trace:
    """The finding of docs/your_scheduler.md: the scheduler lives, and a read is wrong."""
    return replay(FINDING).trace("a flush between an abort and its result")


def page_of(trace: Trace, folder: Path) -> str:
    """The address of the timeline of a run."""
    path = folder / "timeline.html"
    path.write_text(render_timeline([trace]), encoding="utf-8")
    return path.as_uri()


@contextmanager
def session(*options: str) -> Iterator[str]:
    """Run ``scripted shell --web`` in a process of its own, and yield its address."""
    command = [sys.executable, "-m", "scripted", "shell", "--web", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\S+/", address)
            yield address
        finally:
            process.terminate()


def give(page: Any, line: str) -> None:
    """Type a line into the debugger, and wait until the session has done it."""
    page.fill("#line", line)
    page.keyboard.press("Enter")
    page.locator("#log b", has_text=f"> {line}").last.wait_for()
    page.locator("#line:enabled").wait_for()
