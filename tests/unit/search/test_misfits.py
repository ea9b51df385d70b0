"""A mutant that the installed scheduler has no place for is skipped by name, and the others are searched for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripted.cli import app

EXAMPLE = Path(__file__).parents[3] / "examples/your_scheduler"
ADAPTER = """
from adapter import Config, Machine
from scripted.sdk import Capabilities, Limits, Mutant, SchedulerAdapter


def mutant(name, place, cut, becomes, **more):
    return Mutant(
        name=name, origin="a test", bug="a bug", signature="", test="",
        target="scheduler:" + place, cut=cut, becomes=becomes, **more,
    )


ADAPTER = SchedulerAdapter(
    "misfits",
    config=Config,
    machine=Machine,
    limits=lambda config: Limits(
        block_size=4, blocks=config.blocks, batch_tokens=16, batch_requests=4, context_tokens=48, depth=2
    ),
    can=lambda _: Capabilities(),
    mutants=[
        mutant("moved", "Scheduler._gone", "a", "b"),
        mutant("never-freed", "Scheduler._end", "self._give_back(request)", "pass", kind="imitated", note="by a test"),
        mutant("rewritten", "Scheduler._end", "self.give_all_back(request)", "pass"),
    ],
)
"""


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("adapter", "scheduler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "misfits.py"
    path.write_text(ADAPTER)
    return str(path)


def test_what_does_not_fit_is_skipped_by_name(adapter: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = CliRunner().invoke(app, ["gallery", "find", "--all", "--adapter", adapter, "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    moved, found, rewritten, summary = done.output.splitlines()
    assert moved.startswith("moved: SKIPPED: the mutant moved does not fit: there is no scheduler:Scheduler._gone")
    assert found.startswith("never-freed: schedule ")
    assert "must have 'self.give_all_back(request)' exactly once, but the function has it 0 times" in rewritten
    assert summary == "found 1 of 3, skipped moved, rewritten"
    rows = page.read_text().splitlines()[2:]
    assert rows[0] == "| `moved`: a bug | a test | skipped: it does not fit the installed version |"
    assert rows[1].startswith("| `never-freed`: a bug (imitated: by a test) | a test | schedule ")


def test_a_search_for_one_that_does_not_fit_has_failed(adapter: str) -> None:
    done = CliRunner().invoke(app, ["gallery", "find", "moved", "--adapter", adapter])
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, "found 0 of 1, skipped moved")
