"""Failures are sorted by their causes, and nothing hides behind the first one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from scripted_lockstep.mutants.gallery import switched_on

from benchmarks.sorting import judge
from scripted.core.defects import Defect
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search import kinds
from scripted.search.decisions import Decisions, _functions
from scripted.search.execution import Failure, execute
from scripted.search.kinds import Kind, SchedulePart, Sorter, _fewest_parts, parts_of, restricted
from scripted.search.units import Finding

FLUSH = "flush-ignores-in-flight"
RACE = "pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush"


@pytest.fixture(autouse=True)
def sorts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a search leaves more failures for its end."""
    monkeypatch.setattr(kinds, "_AT_ONCE_S", 600.0)


def finding(text: str, mutant: str | None = None) -> Finding:
    failure = execute(Schedule.parse(text)).failure
    assert failure is not None
    return Finding(text, (), failure, mutant=mutant)


def test_a_failure_of_another_schedule_is_of_the_same_kind() -> None:
    """Other settings, events and numbers beside the cause make no other kind."""
    seen: list[Kind] = []
    with switched_on(FLUSH):
        sorter = Sorter(on_new=seen.append)
        sorter.add(finding(RACE))
        sorter.add(finding("pp_size=4 pp_async_depth=1 page_size=4; 1 start b prompt=9; 2 abort c; 5 flush"))
        sorter.add(finding("pp_size=2 pp_async_depth=2; 1 start a prompt=70 new=3; 1 start b prompt=5; 3 flush"))
    (kind,) = seen
    assert sorter.kinds == seen
    assert kind.seen == 3
    assert "flush" in kind.events


def test_two_causes_of_one_schedule_are_two_kinds() -> None:
    """The second bug's failure is not hidden behind the first one's, which shows in every schedule that it is in."""
    sorter = Sorter()
    with switched_on(FLUSH):
        sorter.add(finding(RACE))
    with switched_on("abort-ignores-in-flight"):
        sorter.add(finding("pp_size=4 pp_async_depth=2; 1 start a prompt=125; 3 abort a; 30 flush"))
    assert len(sorter.new) == 2


def test_two_failures_with_few_common_lines_are_two_kinds() -> None:
    """Any two events share some lines: that is no common cause."""
    with switched_on(FLUSH):
        one, other, same = (Kind(failing, failing.schedule, failing.failure) for failing in [finding(RACE)] * 3)
    sorter = Sorter()
    sorter.kinds = [one]
    for kind, lines in ((one, range(40)), (other, range(30, 400)), (same, range(30))):
        kind.is_examined, kind.root = True, "Violation in tell: nothing aborted it"
        kind.needed = frozenset(("Scheduler.abort", line) for line in lines)
    assert sorter._same(other) is None
    assert sorter._same(same) is one


def test_failures_of_one_wrong_decision_are_one_kind() -> None:
    with switched_on(FLUSH):
        one, other = (Kind(failing, failing.schedule, failing.failure) for failing in [finding(RACE)] * 2)
    sorter = Sorter()
    sorter.kinds = [one]
    for kind, root in ((one, "a simplest failure"), (other, "another one")):
        kind.is_examined, kind.root, kind.decision = True, root, "flush.py:52, in ask: if not busy:"
    assert sorter._same(other) is one
    other.decision = "flush.py:53, in ask: if late:"
    assert sorter._same(other) is None


def named(words: str) -> Failure:
    return Failure("Violation", words, 1, words)


@pytest.mark.parametrize(
    ("fails", "decisions", "root", "lines", "is_one"),
    [
        ("alike", ("if full:", "if full:"), "another", 30, True),
        ("alike", ("if full:", "if full:"), "empty", 29, False),
        ("alike", ("if full:", ""), "empty", 30, True),
        ("alike", ("", ""), "empty", 29, False),
        ("alike", ("if full:", "if late:"), "empty", 60, True),
        ("alike", ("if full:", "if late:"), "empty", 59, False),
        ("alike", ("if full:", "if late:"), "another", 100, False),
        ("unlike", ("if full:", "if full:"), "another", 80, True),
        ("unlike", ("if full:", "if full:"), "empty", 79, False),
        ("unlike", ("", ""), "empty", 50, True),
        ("unlike", ("", ""), "empty", 49, False),
        ("unlike", ("if full:", ""), "empty", 100, False),
        ("unlike", ("if full:", "if late:"), "empty", 100, False),
    ],
)
def test_the_less_two_failures_share_the_more_lines_they_need_in_common(
    fails: str, decisions: tuple[str, str], root: str, lines: int, is_one: bool
) -> None:
    """A branch that leaves nothing to compute lets any failure pass, and one defect may shrink to another's failure."""
    schedule = Schedule.parse(RACE)
    one, other = (Kind(Finding(RACE, (), named(how)), schedule, named(how)) for how in ("alike", fails))
    one.is_examined = other.is_examined = True
    (one.decision, other.decision), one.root, other.root = decisions, "empty", root
    one.needed = frozenset(("step", line) for line in range(100))
    other.needed = frozenset(("step", line) for line in range(100 - lines, 200 - lines))
    sorter = Sorter()
    sorter.kinds = [one]
    assert sorter._same(other) is (one if is_one else None)


def test_the_kind_with_most_in_common_is_taken() -> None:
    schedule = Schedule.parse(RACE)
    first, second, found = (Kind(Finding(RACE, (), named("alike")), schedule, named("alike")) for _ in range(3))
    for kind, lines in ((first, range(50, 150)), (second, range(10, 110)), (found, range(100))):
        kind.is_examined, kind.decision = True, "if full:"
        kind.needed = frozenset(("step", line) for line in lines)
    sorter = Sorter()
    sorter.kinds = [first, second]
    assert sorter._same(found) is second


def explained(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], str]) -> tuple[Kind | None, Schedule | None]:
    """Return what explains a flush and an abort, where a flush was found before, if schedules fail like this."""

    def way_to_fail(schedule: Schedule, _signature: str | None) -> tuple[object, Failure | None]:
        said = fails(str(schedule))
        return execute, Failure("Violation", said, 1, said) if said else None

    monkeypatch.setattr("scripted.search.kinds.way_to_fail", way_to_fail)
    known = Schedule.parse("default; 1 start a prompt=9; 3 flush")
    flush = Failure("Violation", "by the flush", 3, "by the flush")
    sorter = Sorter()
    sorter.kinds = [Kind(Finding(str(known), (), flush), known, flush)]
    return sorter._explained(Schedule.parse("default; 1 start b prompt=5; 3 flush; 5 abort b"), "by the abort")


def test_a_second_cause_is_what_fails_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(text: str) -> str:
        return next((f"by the {word}" for word in ("abort", "flush") if word in text), "")

    kind, rest = explained(monkeypatch, fails)
    assert kind is not None
    assert str(rest) == "default; 1 start b prompt=5; 5 abort b"


def test_parts_of_a_kind_that_pass_alone_explain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(monkeypatch, lambda text: "by the abort" if "abort" in text else "") == (None, None)


def test_a_failure_whose_smallest_schedule_is_known_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action may be of a kind that no row has, and shrink to one of a row."""
    first = "pp_size=4; 1 start b prompt=9; 4 flush"
    with switched_on(FLUSH):
        sorter = Sorter()
        sorter.add_known(Defect(id="known", schedules=(f"adapter=lockstep {RACE}",)), "lockstep")
        explained = sorter._explained

        def of_others(schedule: Schedule, signature: str) -> tuple[Kind | None, Schedule | None]:
            return (None, None) if str(schedule) == first else explained(schedule, signature)

        monkeypatch.setattr(sorter, "_explained", of_others)
        monkeypatch.setattr(sorter, "_same", lambda _: None)
        sorter.sort(finding(first))
    assert not sorter.new
    assert [kind.seen for kind in sorter.kinds] == [1]


def test_a_known_defect_is_counted_and_one_that_no_longer_comes_is_named() -> None:
    known = Defect(id="known", schedules=(f"adapter=lockstep {RACE}",))
    mended = Defect(id="mended", schedules=("adapter=lockstep default; 1 flush",))
    strange = Defect(id="strange", schedules=("adapter=lockstep no_such_setting=2; 1 start a prompt=1",))
    with switched_on(FLUSH):
        sorter = Sorter()
        for defect in (known, mended, strange):
            sorter.add_known(defect, "lockstep")
        sorter.add(finding("pp_size=4 pp_async_depth=2; 1 start b prompt=9; 5 flush"))
    assert sorter.gone == [mended, strange]
    assert not sorter.new
    assert [(kind.defect, kind.seen) for kind in sorter.kinds] == [(known, 1)]


def test_the_wrong_decision_is_the_branch_whose_reversal_passes() -> None:
    with switched_on(FLUSH):
        branch = Decisions(Schedule.parse(RACE)).wrong()
    assert branch is not None
    assert "flush" in str(branch)
    assert execute(Schedule.parse(RACE)).failure is None, "the code is as it was"
    assert Decisions(Schedule.parse(RACE)).wrong() is None, "what passes has no wrong decision"


def test_parts_are_settings_events_and_fields() -> None:
    schedule = Schedule.parse("pp_size=2; 1 start a prompt=40 priority=1; 3 flush")
    parts = parts_of(schedule)
    assert parts == {
        SchedulePart("", "pp_size"),
        SchedulePart("start"),
        SchedulePart("start", "priority"),
        SchedulePart("flush"),
    }
    assert str(restricted(schedule, frozenset({SchedulePart("start")}))) == "default; 1 start a prompt=40"
    assert restricted(schedule, parts) == schedule


def test_a_kind_learns_the_shapes_of_its_failures() -> None:
    failure = Failure("Violation", "it breaks", 3, "it breaks")
    texts = ("default; 1 start a prompt=9; 3 flush", "pp_size=2; 1 start a prompt=9; 3 pause")
    one, other = (Kind(Finding(text, (), failure), Schedule.parse(text), failure) for text in texts)
    one.take(other)
    one.take(other)
    assert one.shapes == [parts_of(Schedule.parse(text)) for text in texts]


def test_a_written_schedule_is_reduced_to_the_parts_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def way_to_fail(schedule: Schedule, _signature: str | None) -> tuple[object, Failure | None]:
        failure = Failure("Violation", "it breaks", 3, "it breaks")
        return execute, failure if "flush" in str(schedule) else None

    monkeypatch.setattr("scripted.search.kinds.way_to_fail", way_to_fail)
    written = Schedule.parse("pp_size=2; 1 start a prompt=9 priority=1; 3 flush; 5 abort a")
    assert _fewest_parts(written, "it breaks") == {SchedulePart("start"), SchedulePart("flush")}


def test_only_so_many_wait_to_be_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted.search.kinds._AT_ONCE_S", -1.0)
    monkeypatch.setattr("scripted.search.kinds._WAITING_LIMIT", 2)
    sorter = Sorter()
    failure = finding_of_script()
    for _ in range(5):
        sorter.add(failure)
    assert sorter.unsorted == 3
    sorter.finish(60)
    assert (len(sorter.kinds), sorter.kinds[0].seen, sorter.unsorted) == (1, 2, 3)


def test_what_is_not_sorted_in_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted.search.kinds._AT_ONCE_S", -1.0)
    sorter = Sorter()
    sorter.add(finding_of_script())
    sorter.add(finding_of_script())
    sorter.finish(0)
    assert (sorter.unsorted, sorter.kinds) == (2, [])


def test_a_promise_that_was_sorted_often_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = finding_of_script()
    often, seldom = (msgspec.structs.replace(failing.failure, signature=name) for name in ("often", "seldom"))
    sorter, sorted_first = Sorter(), []
    sorter._waiting = [msgspec.structs.replace(failing, failure=one) for one in (often, seldom)]
    sorter._sorted["often"] = 3
    monkeypatch.setattr(sorter, "sort", sorted_first.append)
    sorter._sort_newest()
    assert [one.failure.signature for one in sorted_first] == ["seldom"]


def test_a_script_that_fails_with_other_events_is_another_kind() -> None:
    sorter = Sorter()
    for events in ("3 flush", "3 pause", "9 flush"):
        sorter.sort(finding_of_script(events))
    assert [kind.seen for kind in sorter.kinds] == [2, 1]


def finding_of_script(events: str = "3 flush") -> Finding:
    with switched_on(FLUSH):
        failure = execute(Schedule.parse(RACE)).failure
    assert failure is not None
    file = Path(__file__).parents[2] / "registered/pipeline/test_flush_in_flight.py"
    extra: tuple[Placed, ...] = Schedule.parse(f"default; {events}").placed
    return Finding(f"{file}::test_flush_while_chunk_results_are_in_flight", extra, failure)


def test_pairs_are_judged() -> None:
    judged = judge(["a", "a", "b", "b"], [1, 2, 2, 2])
    assert judged == (1, 2, 2, 4)
    assert "1 of 2 pairs of one bug parted (50.0%)" in str(judged)


def test_a_stand_in_that_answers_nothing_does_not_end_the_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    """D: vLLM keeps callables in place of absent libraries that raise when anything is read from them."""

    class Absent:
        def __call__(self) -> None: ...

        def __getattr__(self, name: str) -> object:
            raise ImportError(f"the library of {name} is not installed")

    def plain() -> None: ...

    module = ModuleType("with_absent_kin")
    plain.__module__ = module.__name__
    module.absent, module.cached = Absent(), functools.cache(plain)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _functions({module.__name__}) == {plain.__code__: plain}
