"""Measures the size of shrunk failures: ``python -m benchmarks.shrinking [--page benchmarks/tables/shrinking.md]``.

For each bug of the gallery the search finds one failure in generated targets and shrinks it. Then it runs every smaller
neighbour, with one event, setting or number less, and the same schedule with other names. The hand-written script for
the bug is listed beside it.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from scripted_lockstep.mutants import mutant_named
from scripted_lockstep.tiers.sim.runner import EngineSim

from engine.core.messages import Completion, Generate, GrammarReady
from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import mutant_names_of, switched_on
from scripted.core.placed_action import Placed
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.script.loader import find_test
from scripted.script.options import ScriptOptions
from scripted.search.campaign import Campaign
from scripted.search.execution import Outcome, record
from scripted.search.mutant_search import HasContracts
from scripted.search.shrinking import shrink, way_to_fail
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

__all__ = ["Checked", "check", "main", "neighbours"]

_BUDGET_S: Final = 120.0
_OTHER_NAMES: Final = ("m", "n", "o", "p", "q")


class Checked(NamedTuple):
    """A shrunk failure: its origin, and the neighbours that still fail in the same way, each with its reduction."""

    mutant: str
    found: Schedule
    shrunk: Schedule
    is_same: bool
    runs: int
    smaller: tuple[tuple[str, Schedule], ...]
    depends_on_names: bool


def neighbours(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield every schedule with one event less, one setting less, or one number lower by one or by half.

    A value at its default is not in the text, so it is no number of the schedule; a number rises to its default only as
    a setting. None falls below one: a request for no tokens is another kind of request.
    """
    placed, adapter = schedule.placed, schedule.adapter
    for at, one in enumerate(placed):
        around = placed[:at], placed[at + 1 :]
        yield "event", schedule.of_placed((*around[0], *around[1]))
        for name, value, default in _fields(one.action):
            is_less = type(value) is int and isinstance(default, int) and value < default
            if value != default and default is not msgspec.NODEFAULT and not is_less:
                action = msgspec.structs.replace(one.action, **{name: default})
                yield "field", schedule.of_placed((*around[0], Placed(one.step, action), *around[1]))
            for less in _lower(value) if value != default else ():
                try:
                    action = msgspec.structs.replace(one.action, **{name: less})
                    yield "number", schedule.of_placed((*around[0], Placed(one.step, action), *around[1]))
                except ValueError:
                    continue
        for less in sorted({1, one.step // 2} - {0}):
            if one.step - less >= 1:
                rest = schedule.of_placed((*around[0], *around[1]))
                yield "step", rest.with_placed([Placed(one.step - less, one.action)])
    words = dict(adapter.config_words(schedule.config))
    for name, value in words.items():
        rest_of = {key: str(other) for key, other in words.items() if key != name}
        changed = [("setting", rest_of)] + [("number", rest_of | {name: str(less)}) for less in _lower(value)]
        for kind, others in changed:
            try:
                yield kind, schedule.with_config(adapter.read_config(others))
            except (ValueError, ScriptDefinitionError):
                continue


def check(finding: Finding, *, budget_s: float = _BUDGET_S) -> Checked:
    """Shrink a finding, with its mutant on, and run all neighbours of the result."""
    found, signature = finding.schedule, finding.failure.signature
    assert found is not None
    shrunk = shrink(found, signature, budget_s=budget_s)
    way, _ = way_to_fail(found, signature)
    smaller = tuple(
        (kind, other)
        for kind, other in neighbours(shrunk.schedule)
        if other != shrunk.schedule and _fails(other, signature, way)
    )
    return Checked(
        finding.mutant or "",
        found,
        shrunk.schedule,
        _fails(shrunk.schedule, signature, way),
        shrunk.runs,
        smaller,
        not _fails(_renamed(shrunk.schedule), signature, way),
    )


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--page", type=Path, help="the page whose table is written again; the text above the table stays"
    )
    parser.add_argument("--findings", type=int, default=100)
    parser.add_argument("--schedules", type=int, default=400, help="schedules per search")
    options = parser.parse_args()
    adapter, rows = adapter_named(DEFAULT_ADAPTER), list[Checked]()
    for mutant in (*mutant_names_of(adapter), *(adapter.contract_names if isinstance(adapter, HasContracts) else ())):
        if len(rows) == options.findings:
            break
        plan = SearchPlan(strategy=StrategyName.RANDOM, schedules=options.schedules, mutant=mutant, stop_at_first=True)
        finding = next(iter(Campaign(plan).run().findings.values()), None)
        if finding is None:
            print(f"{mutant}: not found in {options.schedules} schedules", flush=True)  # noqa: T201
            continue
        with switched_on(adapter, mutant):
            rows.append(check(finding))
        print(_line(rows[-1]), *(f"  {kind}: {one}" for kind, one in rows[-1].smaller), sep="\n", flush=True)  # noqa: T201
    table = "\n".join([*_table(rows), ""])
    print(table)  # noqa: T201
    if options.page is not None:
        above = options.page.read_text(encoding="utf-8").split("| ", maxsplit=1)[0] if options.page.exists() else ""
        options.page.write_text(above + table, encoding="utf-8")


def _fields(action: Any) -> Iterator[tuple[str, Any, Any]]:
    for field in msgspec.structs.fields(action):
        yield field.name, getattr(action, field.name), field.default


def _lower(value: Any) -> Iterable[int]:
    return {value - 1, value // 2} - {value} if type(value) is int and value > 1 else ()


def _fails(schedule: Schedule, signature: str, way: Callable[..., Outcome]) -> bool:
    try:
        failure = way(schedule).failure
    except (ValueError, HarnessError, ScriptDefinitionError):
        return False  # an invalid schedule
    return failure is not None and failure.signature == signature


def _renamed(schedule: Schedule) -> Schedule:
    """Rename rids; rids with a common prefix keep one."""
    rids = dict.fromkeys(rid for one in schedule.placed if (rid := getattr(one.action, "rid", None)) is not None)
    are_alike = any(one != other and other.startswith(one) for one in rids for other in rids)
    if are_alike or len(rids) > len(_OTHER_NAMES):
        names = {rid: f"z{rid}" for rid in rids}
    else:
        names = dict(zip(rids, _OTHER_NAMES[: len(rids)], strict=True))
    placed = [
        Placed(one.step, msgspec.structs.replace(one.action, rid=names[rid]))
        if (rid := getattr(one.action, "rid", None)) in names
        else one
        for one in schedule.placed
    ]
    return schedule.of_placed(placed)


def _size(records: Iterable[Any]) -> tuple[int, int]:
    """Count the messages of clients and operators, and their requests' prompt and output tokens."""
    events = [event for step in records for event in step.events if not isinstance(event, (Completion, GrammarReady))]
    starts = [event for event in events if isinstance(event, Generate)]
    return len(events), sum(len(one.prompt_ids) + one.sampling.max_new_tokens for one in starts)


def _size_of(schedule: Schedule) -> tuple[int, int]:
    outcome, records = record(schedule)
    assert outcome.failure is None, f"{schedule} fails without the mutant: {outcome.failure}"
    # The flush and the query of counters that end every run do not count.
    events, tokens = _size(records)
    return events - 2, tokens


def _size_by_hand(mutant: str) -> tuple[int, int]:
    schedule = mutant_named(mutant).schedule
    if schedule:
        return _size_of(Schedule.parse(schedule))
    test = find_test(mutant_named(mutant).test)
    marks = [mark for mark in getattr(test.script, "pytestmark", ()) if mark.name == "parametrize"]
    arguments: dict[str, Any] = {}
    for mark in marks:
        names, values = mark.args[0], mark.args[1][0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        arguments |= dict(zip(names, values if len(names) > 1 else [values], strict=True))
    options: ScriptOptions = msgspec.structs.replace(test.options, record=True)
    with EngineSim(test.config) as sim:
        return _size(sim.run(test.script, options=options, **arguments).records)


def _line(row: Checked) -> str:
    less = Counter(kind for kind, _ in row.smaller)
    said = ", ".join(f"{count} {kind}" for kind, count in less.items()) or "one-minimal"
    names = ", depends on names" if row.depends_on_names else ""
    same = "" if row.is_same else "ANOTHER SYMPTOM, "
    return f"{row.mutant}: {same}{said}{names}; {row.runs} runs: {row.shrunk}"


def _table(rows: list[Checked]) -> Iterator[str]:
    yield "| what was checked | of these findings |"
    yield "| --- | --- |"
    yield f"| findings | {len(rows)} |"
    yield f"| the symptom that was found | {sum(row.is_same for row in rows)} |"
    yield f"| the same with other names | {sum(not row.depends_on_names for row in rows)} |"
    kinds = [{kind for kind, _ in row.smaller} for row in rows]
    for said, less in (
        ("no event can be left out", {"event"}),
        ("no setting and no field of an event is needless", {"setting", "field"}),
        ("no number can be lower by one or by half", {"number"}),
        ("no event alone can come earlier", {"step"}),
        ("one-minimal: all of these", {"event", "setting", "field", "number", "step"}),
    ):
        yield f"| {said} | {sum(less.isdisjoint(one) for one in kinds)} |"
    sizes = [(_size_of(row.found), _size_of(row.shrunk), _size_by_hand(row.mutant)) for row in rows]
    for column, said in ((0, "messages"), (1, "tokens")):
        found, shrunk, hand = ([size[index][column] for size in sizes] for index in range(3))
        medians = [statistics.median(numbers) for numbers in (found, shrunk, hand)]
        no_more = sum(one <= other for one, other in zip(shrunk, hand, strict=True))
        yield (
            f"| {said}: found, shrunk, written by hand (medians) | "
            f"{medians[0]:,.0f}, {medians[1]:,.0f}, {medians[2]:,.0f} |"
        )
        yield f"| shrunk to no more {said} than written by hand | {no_more} |"


if __name__ == "__main__":
    with interruptible("benchmarks.shrinking"):
        main()
