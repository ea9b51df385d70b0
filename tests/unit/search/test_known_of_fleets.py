"""A fleet's search recognizes the known defects of its machines, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from scripted_lockstep.fleet.members import SearchedEngine
from scripted_lockstep.mutants.gallery import switched_on
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.adapters import adapter_named
from scripted.core.defects import Defect, add_known
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation
from scripted.search.execution import Failure, execute
from scripted.search.kinds import HasParts, SchedulePart, Sorter, _fewest_parts, parts_of, restricted
from scripted.search.units import Finding

FLEET: Final = "lockstep-fleet"
FLUSH: Final = Defect(
    id="flush", schedules=("adapter=lockstep pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush",)
)
# Other machines, steps, settings and requests than in the row.
FLUSHED: Final = (
    'adapter=lockstep-fleet engines=p0,d0,d1 pp_size=2 pp_async_depth=2 page_size=4; 1 begin on=d0 do="start b '
    'prompt=5"; 2 begin on=d1 do="start c prompt=9"; {step} at on=d1 do=flush'
)
ABORTED: Final = (
    'adapter=lockstep-fleet engines=d0 pp_size=4 pp_async_depth=2; 1 begin on=d0 do="start a prompt=125"; '
    '3 at on=d0 do="abort a"; 30 at on=d0 do=flush'
)


def whole() -> HasParts:
    fleet = adapter_named(FLEET)
    assert isinstance(fleet, HasParts)
    return fleet


def finding(text: str) -> Finding:
    failure = execute(Schedule.parse(text)).failure
    assert failure is not None, text
    return Finding(text, (), failure, FLEET)


def flushed() -> Finding:
    """Return a fleet's failure by the flush, at the first step in which it meets a batch in flight."""
    texts = [FLUSHED.format(step=step) for step in range(2, 20)]
    return finding(next(text for text in texts if execute(Schedule.parse(text)).failure is not None))


def test_a_known_defect_of_one_machine_is_known_in_a_fleet() -> None:
    with switched_on("flush-ignores-in-flight"):
        sorter = Sorter()
        sorter.add_known_of_part(FLUSH, whole())
        sorter.sort(flushed())
    assert not sorter.new
    assert [(kind.defect, kind.seen) for kind in sorter.kinds] == [(FLUSH, 1)]
    assert not sorter.gone, "what a fleet does not show may still be there"


def test_an_operators_call_is_known_at_either_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted.search.kinds.way_to_fail", way_to_fail)
    row = Defect(id="asleep", schedules=("adapter=lockstep default; 1 sleep",))
    sorter = Sorter()
    sorter.add_known_of_part(row, whole())
    for on in ("d0", "p0"):
        text = f'adapter=lockstep-fleet engines=p0,d0; 1 begin on=d0 do="start a prompt=3"; 3 at on={on} do=sleep'
        sorter.sort(Finding(text, (), ASLEEP, FLEET))
    assert not sorter.new
    assert [kind.seen for kind in sorter.kinds] == [1, 1]


ASLEEP: Final = Failure("KeyError", "'kv_cache'", 3, "KeyError in sleep: #")


def way_to_fail(schedule: Schedule, _signature: str | None) -> tuple[object, Failure | None]:
    """Let each schedule with a sleep fail like this."""
    return execute, ASLEEP if "sleep" in str(schedule) else None


def test_without_the_table_it_is_new() -> None:
    with switched_on("flush-ignores-in-flight"):
        sorter = Sorter()
        sorter.sort(flushed())
    assert len(sorter.new) == 1


def test_another_defect_stays_new_beside_a_known_one() -> None:
    sorter = Sorter()
    sorter.add_known_of_part(FLUSH, whole())
    with switched_on("flush-ignores-in-flight"):
        sorter.sort(flushed())
    with switched_on("abort-ignores-in-flight"):
        sorter.sort(finding(ABORTED))
    (new,) = sorter.new
    assert new.failure.signature == finding_of_abort().failure.signature


def finding_of_abort() -> Finding:
    with switched_on("abort-ignores-in-flight"):
        return finding(ABORTED)


def test_a_row_is_retold_for_one_machine_and_for_either_role() -> None:
    row = Schedule.parse("adapter=lockstep page_size=4; 2 start a prompt=3; 3 advance seconds=1; 5 flush")
    told = [str(one) for one in whole().retold(row)]
    assert told[0] == (
        'adapter=lockstep-fleet engines=d0 page_size=4; 2 begin on=d0 do="start a prompt=3"; 3 advance seconds=1.0; '
        "5 at on=d0 do=flush"
    )
    assert sum("at on=p0 do=flush" in one for one in told) == 5
    assert any(one.endswith("19 at on=d0 do=flush") and "engines=p0,d0" in one for one in told)
    assert len(told) == len(set(told))


def test_a_row_with_an_event_that_a_fleet_lacks_is_not_retold() -> None:
    row = Schedule.parse("adapter=lockstep pp_size=2; 1 start a prompt=3; 3 kill stage=1")
    assert list(whole().retold(row)) == []


def test_the_machines_are_no_part_of_a_schedule() -> None:
    """Actions name them, so that a schedule without them would be refused, or be another one."""
    schedule = Schedule.parse(FLUSHED.format(step=3))
    assert SchedulePart("", "engines") not in parts_of(schedule)
    left = restricted(schedule, frozenset({SchedulePart("d start")}))
    assert left is not None
    assert left.config.names == ("p0", "d0", "d1")


@pytest.mark.parametrize("method", ["check_quiet", "step"])
def test_the_signature_is_that_of_the_machine_that_broke_its_promise(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At the end and in a step. A row of one machine's promise was not recognized in a fleet's step."""

    def broken(member: SearchedEngine) -> None:
        if member.name == "p0":
            raise Violation("2 prompts are kept for others")

    monkeypatch.setattr(SearchedEngine, method, broken)
    text = 'adapter=lockstep-fleet engines=p0,d0; 1 begin on=d0 do="start a prompt=3"'
    failure = execute(Schedule.parse(text)).failure
    assert failure is not None
    assert failure.text == "engine p0: 2 prompts are kept for others"
    assert failure.signature == "Violation in broken: # prompts are kept for others"


def test_the_command_reads_the_machines_rows_too(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    add_known(known, FLUSH)
    options = ["--adapter", FLEET, "--known", str(known), "--no-keep", "--strategy", "exhaustive"]
    with switched_on("flush-ignores-in-flight"):
        done = CliRunner().invoke(app, ["explore", flushed().target, *options, "--schedules", "3"])
    assert "known  flush" in done.output, done.output
    assert done.exit_code == 0


def test_a_row_without_requests_is_reduced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's call alone may end a scheduler: no request has to be there."""
    monkeypatch.setattr("scripted.search.kinds._fails", lambda schedule, _: "flush" in str(schedule))
    assert _fewest_parts(Schedule.parse("pp_size=2; 3 flush"), "it breaks") == {SchedulePart("flush")}


def test_failures_without_a_text_are_told_apart_by_their_lines() -> None:
    """An assertion of a scheduler often has none, and one function has several."""

    def first_of_each(ones: tuple[int, ...], others: tuple[int, ...]) -> None:
        next(iter(ones))
        next(iter(others))

    gate = Run(Schedule.parse("default; 1 start a prompt=3"))
    failures = []
    for given in (((), (1,)), ((1,), ())):
        with pytest.raises(StopIteration) as caught:
            first_of_each(*given)
        failures.append(Failure.of(caught.value, gate))
    assert [one.text for one in failures] == ["next(iter(ones))", "next(iter(others))"]
    assert failures[0].signature != failures[1].signature
