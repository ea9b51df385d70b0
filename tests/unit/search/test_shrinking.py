"""Shrinking keeps the failure that was found, and nothing single can be left out of what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_lockstep.mutants.gallery import switched_on

from benchmarks.shrinking import check
from scripted import api
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import execute, record
from scripted.search.failure_database import FailureDatabase
from scripted.search.generated import generated_schedule, generated_target
from scripted.search.shrinking import forms_of, shrink, way_to_fail
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

FLUSH = "flush-ignores-in-flight"


def failing(mutant: str, *, first: int = 0, below: int = 150) -> Schedule:
    """The first generated target from this number on that fails with a mutant on."""
    for number in range(first, below):
        schedule = generated_schedule(number, "lockstep")
        if execute(schedule).failure is not None:
            return schedule
    raise AssertionError(f"no generated target below {below} fails with {mutant}")


@pytest.mark.parametrize(
    ("mutant", "first"),
    # The first target that shows the second one takes a thousand runs to shrink, to the same two requests.
    [
        (FLUSH, 0),
        pytest.param("victim-is-the-earliest", 99, marks=pytest.mark.nightly),
        ("token-after-the-end", 0),
        pytest.param("update-keeps-the-cache", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_shrunk_failure_is_one_minimal_and_the_same(mutant: str, first: int) -> None:
    """Also in a pool's size, in numbers below their defaults and in steps, and under other names."""
    with switched_on(mutant):
        found = failing(mutant, first=first)
        failure = execute(found).failure
        assert failure is not None
        checked = check(Finding(str(found), (), failure, mutant=mutant), budget_s=60)
    assert checked.is_same
    assert not checked.smaller
    assert not checked.depends_on_names


def test_a_search_that_ran_out_of_time_says_so() -> None:
    with switched_on(FLUSH):
        shrunk = shrink(failing(FLUSH), budget_s=0.001)
    assert shrunk.fails
    assert not shrunk.is_minimal


@pytest.mark.parametrize(
    ("of", "runs"), [("lockstep", 3), ("lockstep-fleet", 3), ("tests/registered/sdk/example_adapter.py", 1)]
)
def test_a_schedule_runs_once_if_every_run_makes_the_same_checks(
    of: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a search in the schedulers of others, two thirds of the time for sorting went into runs made twice before."""
    begun: list[type] = []
    init = Run.__init__

    def begin(run: Run, *args: Any, **named: Any) -> None:
        begun.append(type(run))
        init(run, *args, **named)

    monkeypatch.setattr(Run, "__init__", begin)
    assert way_to_fail(generated_schedule(1, of), None)[1] is None
    assert begun.count(Run) == runs


def test_the_failure_that_was_found_is_kept_where_a_whole_run_fails_otherwise() -> None:
    """A fork that is not compared with the specification fails later, and of something else, than a whole run."""
    mutant = "wrong-guesses-count-as-computed"
    with switched_on(mutant):
        for number in range(100):
            schedule = generated_schedule(number, "lockstep")
            whole, fork = execute(schedule).failure, execute(schedule, leave_out=True).failure
            if whole is not None and fork is not None and whole.signature != fork.signature:
                break
        else:
            raise AssertionError(f"no generated target shows {mutant} in two ways")
    shrunk = api.shrink(Finding(generated_target(number), (), fork, mutant=mutant))
    with switched_on(mutant):
        again = execute(shrunk.schedule, leave_out=True).failure
    assert shrunk.fails
    assert again is not None
    assert again.signature == fork.signature


def test_what_only_the_records_of_a_run_show_is_shrunk_and_kept_too(tmp_path: Path) -> None:
    """A digest that leaves something out, and an engine that is restored with another cache, stop no step."""
    mutant = "a-digest-without-pages"
    plan = SearchPlan(schedules=100, mutant=mutant, strategy=StrategyName.RANDOM, stop_at_first=True)
    (finding,) = Campaign(plan).run().findings.values()
    found = finding.schedule
    assert found is not None
    with switched_on(mutant):
        assert execute(found).failure is None
        checked = check(finding, budget_s=60)
    assert checked.is_same
    assert not checked.smaller
    assert len(checked.shrunk.placed) < len(found.placed)
    FailureDatabase(tmp_path / "failures").add(checked.shrunk, finding.failure)
    with switched_on(mutant):
        (kept,) = FailureDatabase(tmp_path / "failures").replay("lockstep")
        assert kept.failure is not None
        assert kept.failure.signature == finding.failure.signature
        assert record(checked.shrunk)[0].failure == kept.failure


def test_names_become_plain_where_they_do_not_matter() -> None:
    text = "pp_size=4 pp_async_depth=2 chunked_prefill_size=64; 1 start my-request-7 prompt=125 new=2; 4 flush"
    with switched_on(FLUSH):
        shrunk = shrink(Schedule.parse(text))
    assert shrunk.fails
    assert [one.action.rid for one in shrunk.schedule.placed if one.action.is_start] == ["a"]  # type: ignore[attr-defined]
    with switched_on("abort-matches-by-prefix"):
        found = Schedule.parse("pp_size=2; 1 start r-1 prompt=9 new=9; 1 start r-10 prompt=9 seed=1 new=9; 5 abort r-1")
        shrunk = shrink(found)
        assert shrunk.fails
        rids = [one.action.rid for one in shrunk.schedule.placed]  # type: ignore[attr-defined]
        assert any(one != other and other.startswith(one) for one in rids for other in rids)


@pytest.mark.parametrize("rids", [("a", "b"), ("b", "a"), ("x", "a-1"), ("request-of-mine", "r-10"), ("r-1", "r-10")])
def test_a_signature_does_not_depend_on_names(rids: tuple[str, str]) -> None:
    """'a' is a name and an article, and a name may be a part of another one."""
    signatures = set()
    for one, other in (rids, ("m", "n")):
        text = f"pp_size=2; 1 start {one} prompt=40 new=3; 1 start {other} prompt=33 seed=1 new=2; 3 abort {one}"
        with switched_on("abort-waits-for-a-token"):
            failure = execute(Schedule.parse(text)).failure
        assert failure is not None
        signatures.add(failure.signature)
    assert len(signatures) == 1


def test_the_simplest_form_of_any_failure_follows_the_shrunk_one() -> None:
    """For a script that breaks another promise before the one of its schedule."""
    of, mutant = "tests/registered/sdk/example_adapter.py", "only-the-first-block-comes-back"
    small = Schedule.parse("default; 1 start a prompt=6 new=16; 1 start b prompt=14 new=16", of=of)
    forms = list(forms_of(small, mutant, budget_s=1.0))
    assert forms[0] == small
    assert [len(form.placed) for form in forms] == [2, 1]
