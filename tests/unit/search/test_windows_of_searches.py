"""Windows of a whole search: how many runs saw each open, and a search that never did says so and can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_lockstep.adapter import ADAPTER
from typer.testing import CliRunner

from scripted import api
from scripted.cli import app
from scripted.core.protocol import windows_of
from scripted.core.refusals import ScriptDefinitionError


def test_runs_are_counted_in_which_a_window_was_open() -> None:
    line = "default; 1 start a prompt=20 new=9"
    opened = api.explore(line, schedules=3).coverage.windows(windows_of(ADAPTER))
    # The first addition kills a stage at once.
    assert opened["all microbatches are in flight"] == 2
    assert opened["a request was sent back to the queue"] == 0


LINE = "default; 1 start a prompt=20 new=9"
SCRIPT = str(
    Path(__file__).parents[3]
    / "tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight"
)


def run(*arguments: str, target: str = LINE) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explore", target, "--schedules", "3", "--no-keep", *arguments])
    if isinstance(result.exception, ScriptDefinitionError):
        raise result.exception
    return result.exit_code, result.output


def test_a_search_that_never_reaches_a_window_says_so_and_can_fail() -> None:
    status, said = run()
    assert status == 0
    assert "never  " in said
    status, said = run("--must-reach", "a request was sent back to the queue")
    assert status == 1
    assert "--must-reach fails the search" in said
    assert run("--must-reach", "all microbatches are in flight")[0] == 0
    with pytest.raises(ScriptDefinitionError, match="declares no window 'no such window'"):
        run("--must-reach", "no such window")


def test_a_search_of_a_script_says_nothing_of_windows_that_it_does_not_watch() -> None:
    """Every window was said to be never open, the script's own among them."""
    status, said = run(target=SCRIPT)
    assert status == 0
    assert "never  " not in said
    with pytest.raises(ScriptDefinitionError, match="name windows in its own must_reach"):
        run("--must-reach", "all", target=SCRIPT)
