"""Bounded claims: every placement is counted, a bug in any of them is found, and what is known is not run again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from scripted_lockstep.mutants.gallery import switched_on
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.action import Action
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.bounded import check_all_orders
from scripted.search.execution import execute

TINY = "pp_size=2 page_size=4 max_total_tokens=64; 1 start a prompt=5 new=1; 1 flush; 1 abort a"
RACE = "pp_size=4 pp_async_depth=2; 1 start a prompt=1; 1 flush; 1 pause; 1 continue"
FLUSH = "flush-ignores-in-flight"


def placements(actions: tuple[Action, ...], steps: int, together: int) -> set[tuple[tuple[Action, ...], ...]]:
    """Enumerate by brute force the actions of each step, in order."""
    if not steps:
        return {()}
    found = set()
    for count in range(min(together, len(actions)) + 1):
        for chosen in itertools.permutations(actions, count):
            left = tuple(action for action in actions if action not in chosen)
            found |= {(chosen, *rest) for rest in placements(left, steps - 1, together)}
    return found


@pytest.mark.parametrize(("depth", "together"), [(3, 1), (3, 2), (2, 3)])
def test_every_placement_is_counted(depth: int, together: int) -> None:
    """A claim counts each order of its events at each step, those in flight too (B15)."""
    schedule = Schedule.parse(TINY)
    checked = check_all_orders(schedule, depth=depth, together=together)
    actions = tuple(placed.action for placed in schedule.placed)
    assert checked.schedules == len(placements(actions, depth, together))
    assert checked.complete
    assert checked.failure is None
    assert checked.states > 0
    assert checked.merged > 0


def test_a_bug_is_found_with_a_schedule_that_shows_it() -> None:
    """A mutant is caught (D11)."""
    with switched_on(FLUSH):
        checked = check_all_orders(Schedule.parse(RACE), depth=4)
        assert checked.schedule is not None
        failure = execute(checked.schedule).failure
    assert failure is not None
    assert failure == checked.failure
    assert "This request holds the node from another tree" in failure.text
    assert not checked.complete
    assert execute(checked.schedule).failure is None


def test_actions_that_are_alike_are_one() -> None:
    one, two = (
        check_all_orders(Schedule.parse(f"default; {text}"), depth=3) for text in ("1 flush", "1 flush; 1 flush")
    )
    # None, one at each of three steps; then two, at one step or at two.
    assert one.schedules == 4
    assert two.schedules == 4 + 3 + 3


def test_a_search_that_is_stopped_claims_nothing() -> None:
    checked = check_all_orders(Schedule.parse(TINY), seconds=0.0)
    assert not checked.complete
    assert "no claim" in str(checked)


def test_nothing_to_place_is_refused() -> None:
    with pytest.raises(ScriptDefinitionError, match="needs actions"):
        check_all_orders(Schedule.parse("pp_size=2"))


def test_the_command_says_its_claim_and_fails_for_a_bug() -> None:
    passed = CliRunner().invoke(app, ["bound", TINY, "--depth", "2"])
    assert passed.exit_code == 0
    assert "none breaks a promise" in passed.output
    failed = CliRunner().invoke(app, ["bound", RACE, "--depth", "4", "--mutant", FLUSH])
    assert failed.exit_code == 1
    assert f"--mutant {FLUSH}" in failed.output


def test_a_page_gets_the_numbers_of_its_rows(tmp_path: Path) -> None:
    page = tmp_path / "bounds.md"
    head = Path("benchmarks/tables/bounds.md").read_text(encoding="utf-8").partition("| `")[0]
    page.write_text(f"{head}| `{TINY}` | 2 | 2 | 0 | 0 | |\n", encoding="utf-8")
    assert CliRunner().invoke(app, ["bound", "--page", str(page)]).exit_code == 0
    *_, row = page.read_text(encoding="utf-8").splitlines()
    count = len(placements(tuple(placed.action for placed in Schedule.parse(TINY).placed), 2, 2))
    assert row.startswith(f"| `{TINY}` | 2 | 2 | {count} | ")
    assert row.endswith("| by none |")
