"""Measures how well failures are sorted by cause: ``python -m benchmarks.sorting [--defects] [--each 10]``.

Each bug of the gallery is found in several schedules; with ``--defects``, each known defect of the installed release is
found in variants of its schedules, and benchmarks/tables/sorting.md is written. The sorter of ``scripted explore`` gets
all of these failures, and every pair is judged: two failures of one bug in two kinds are wrongly parted, two failures
of two bugs in one kind are wrongly joined. The same numbers are given for sorting by the failures' texts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import operator
import random
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.defects import Defect, defects_of
from scripted.core.mutant import mutant_names_of, switched_on
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk import SchedulerAdapter
from scripted.search.campaign import Campaign
from scripted.search.execution import Failure, execute
from scripted.search.generated import first_of
from scripted.search.kinds import Sorter, parts_of, restricted
from scripted.search.mutant_search import adapter_of
from scripted.search.shrinking import shrink
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

__all__ = ["Judged", "Sorted", "judge", "main", "page_of"]

_TABLES: Final = Path(__file__).with_name("tables")
_COLUMNS: Final = 100
_HEADS: Final = (
    "| pairs of one | parted | by text | pairs of two | joined | by text "
    "| pairs of one kind | of two defects | by text "
)

# The process time for all schedules of one bug.
_SEARCH_S: Final = 20.0
_SCHEDULES: Final = 300
# The process time for the smallest form of a variant.
_SHRINK_S: Final = 2.0
# The numbers of a known defect's schedule that its variants change, each with the probability ``_OTHER``.
_NUMBERS: Final = re.compile(r"(\b(?:prompt|new|tokens)=)(\d+)")
_SIZES: Final = re.compile(r"(\b(?:num_gpu_blocks|max_\w+|context_length)=)(\d+)")
_OTHER: Final = 0.4


class Judged(NamedTuple):
    """Pairs of failures, counted by a sorter's result."""

    parted: int
    of_one_bug: int
    joined: int
    of_two_bugs: int

    @property
    def of_one_kind(self) -> int:
        return self.of_one_bug - self.parted + self.joined

    def __str__(self) -> str:
        parted, joined = self.parted / max(1, self.of_one_bug), self.joined / max(1, self.of_two_bugs)
        return (
            f"{self.parted:,} of {self.of_one_bug:,} pairs of one bug parted ({parted:.1%}), "
            f"{self.joined:,} of {self.of_two_bugs:,} pairs of two bugs joined ({joined:.1%}), which are "
            f"{self.joined / max(1, self.of_one_kind):.1%} of the {self.of_one_kind:,} pairs of one kind"
        )


class Sorted(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a known defect that fail alike and were sorted into one kind, by the kind's number.

    ``known`` is the defect into which they were sorted when all were known; empty for none.
    """

    release: str
    defect: str
    kind: int
    signature: str
    failures: int
    seed: int
    known: str = ""


def judge(bugs: Sequence[str], sorted_to: Sequence[Hashable]) -> Judged:
    """Judge every pair of failures by its bug and by its sorted kind."""
    parted = one = joined = two = 0
    for (bug, kind), (other_bug, other_kind) in itertools.combinations(zip(bugs, sorted_to, strict=True), 2):
        if bug == other_bug:
            one += 1
            parted += kind != other_kind
        else:
            two += 1
            joined += kind == other_kind
    return Judged(parted, one, joined, two)


def findings_of(mutant: str, adapter: str, count: int, seed: int) -> list[Finding]:
    """Return failures of this mutant on this many generated targets; fewer if the time runs out."""
    found: list[Finding] = []
    number, until = first_of(seed), time.process_time() + _SEARCH_S
    while len(found) < count and time.process_time() < until:
        plan = SearchPlan(
            generated_from=number,
            seed=number,
            schedules=_SCHEDULES,
            cpu_seconds=_SEARCH_S / 4,
            strategy=StrategyName.RANDOM,
            mutant=mutant,
            stop_at_first=True,
            adapter=adapter,
        )
        findings = list(Campaign(plan).run().findings.values())
        if not findings:
            break
        found += findings[:1]
        number = int(findings[0].target.rpartition(":")[2]) + 1
    return found


def variants_of(defect: Defect, adapter: str, count: int, seed: int) -> list[Finding]:
    """Return failures of a known defect: its first schedule that fails, with other numbers and further requests.

    A variant counts only if it no longer fails once an event or a setting of that schedule is taken out. So must its
    smallest form: other numbers may show another defect.
    """
    schedule = next((one for one in map(_parsed, defect.schedules) if one is not None and _signature(one)), None)
    if schedule is None or schedule.of != adapter:
        return []
    least = _smallest(schedule)
    chance = random.Random(f"{defect.id} {seed}")  # noqa: S311 - which variants are drawn
    found: dict[str, Finding] = {}
    until = time.process_time() + _SEARCH_S
    while len(found) < count and time.process_time() < until:
        variant = _varied(schedule, chance)
        failure = None if variant is None else _failure(variant)
        if (
            variant is not None
            and failure is not None
            and _is_caused_by(schedule, variant)
            and _has_all_of(least, _smallest(variant))
        ):
            found[str(variant)] = Finding(str(variant), (), failure, adapter, defect.id)
    return list(found.values())


def _parsed(text: str) -> Schedule | None:
    try:
        return Schedule.parse(text)
    except (ScriptDefinitionError, ValueError):
        return None


def _failure(schedule: Schedule) -> Failure | None:
    """Return how a schedule fails; None if it passes or makes no run, as with a pool that its engine refuses."""
    try:
        return execute(schedule).failure
    except (ScriptDefinitionError, HarnessError, ValueError):
        return None


def _signature(schedule: Schedule) -> str:
    failure = _failure(schedule)
    return "" if failure is None else failure.signature


def _varied(schedule: Schedule, chance: random.Random) -> Schedule | None:
    """Return the schedule with other numbers and with further requests; None if that makes no run."""

    def other(match: re.Match[str]) -> str:
        return f"{match[1]}{max(1, int(match[2]) + chance.randrange(-2, 3)) if chance.random() < _OTHER else match[2]}"

    settings, _, events = str(schedule).partition(";")
    for number in range(chance.randrange(3)):
        prompt, new = chance.randrange(1, 9), chance.randrange(1, 4)
        events += f"; {chance.randrange(1, 12)} start x{number} prompt={prompt} new={new} seed=7"
    return _parsed(f"{_SIZES.sub(other, settings)};{_NUMBERS.sub(other, events)}")


def _is_caused_by(schedule: Schedule, variant: Schedule) -> bool:
    """Return whether a variant needs each part of the defect's schedule and fails with these parts alone."""
    parts = parts_of(schedule) & parts_of(variant)
    needed = [part for part in parts_of(schedule) if not _signature_of(restricted(schedule, parts - {part}))]
    return bool(_signature_of(restricted(variant, parts_of(schedule)))) and not any(
        _signature_of(restricted(variant, parts_of(variant) - {part})) for part in needed
    )


def _smallest(schedule: Schedule) -> Schedule:
    """Return the smallest schedule that fails like this one, as the sorter finds it."""
    return shrink(schedule, _signature(schedule), budget_s=_SHRINK_S).schedule


def _has_all_of(least: Schedule, smallest: Schedule) -> bool:
    """Return whether a variant's smallest form has the parts and the number of events of the defect's smallest form."""
    events, others = (Counter(one.action.kind for one in form.placed) for form in (least, smallest))
    return parts_of(least) <= parts_of(smallest) and events <= others


def _signature_of(schedule: Schedule | None) -> str:
    has_starts = schedule is not None and any(one.action.is_start for one in schedule.placed)
    return _signature(schedule) if schedule is not None and has_starts else ""


def _collected(options: argparse.Namespace) -> Iterator[Finding]:
    adapter = adapter_named(options.adapter)
    names = [one for one in mutant_names_of(adapter) if adapter_of(one, options.adapter) == options.adapter]
    random.Random(options.seed).shuffle(names)  # noqa: S311 - which mutants are drawn
    left = options.mutants
    for name in names:
        found = findings_of(name, options.adapter, options.each, options.seed)
        if len(found) == options.each:
            yield from found
            left -= 1
        if not left:
            return


def _of_defects(options: argparse.Namespace) -> Iterator[Finding]:
    for defect in defects_of(options.adapter):
        found = variants_of(defect, options.adapter, options.each, options.seed)
        sys.stdout.write(f"{defect.id}: {len(found)} variants\n")
        sys.stdout.flush()
        yield from found


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, sort, judge, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sorting", description=__doc__)
    parser.add_argument("--adapter", default=DEFAULT_ADAPTER)
    parser.add_argument("--mutants", type=int, default=20, help="how many mutants to draw")
    parser.add_argument("--each", type=int, default=10, help="schedules per bug")
    parser.add_argument("--defects", action="store_true", help="known defects of the release instead of mutants")
    parser.add_argument("--seed", type=int, default=1, help="seed for drawing mutants and targets")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for sorting; later failures are left out")
    options = parser.parse_args(arguments)
    findings = list(_of_defects(options) if options.defects else _collected(options))
    # In a search's order, because one bug after another would be easier.
    random.Random(options.seed).shuffle(findings)  # noqa: S311 - an order
    until = time.monotonic() + options.minutes * 60
    kinds = list(_sorted_kinds(findings, until, with_mutants=not options.defects))
    findings = findings[: len(kinds)]
    bugs = [finding.mutant or "" for finding in findings]
    sys.stdout.write(f"by cause: {judge(bugs, kinds)}\n")
    sys.stdout.write(f"by text:  {judge(bugs, [one.failure.signature for one in findings])}\n")
    if options.defects:
        known = list(_sorted_known(findings, options.adapter))
        sys.stdout.write(f"all known: {sum(map(operator.eq, bugs, known))} of {len(bugs)} sorted into their defect\n")
        _write(options, findings, kinds, known)


def _sorted_known(findings: Sequence[Finding], adapter: str) -> Iterator[str]:
    """Sort failures when all defects are known; yield the defect of each, empty for none."""
    sorter = Sorter()
    for defect in defects_of(adapter):
        sorter.add_known(defect, adapter)
    for finding, at in zip(findings, _kinds_in(sorter, findings), strict=True):
        found = sorter.kinds[at].defect
        known = "" if found is None else found.id
        sys.stdout.write(f"{finding.mutant}: known as {known or 'new'}: {finding.target}\n")
        yield known


def _sorted_kinds(findings: Sequence[Finding], until: float, *, with_mutants: bool) -> Iterator[int]:
    """Sort failures until the time is over; yield the number of each one's kind."""
    sorter = Sorter()
    for finding in findings:
        if time.monotonic() > until:
            break
        with switched_on(adapter_named(finding.adapter), finding.mutant if with_mutants else None):
            (at,) = _kinds_in(sorter, [finding])
        sys.stdout.write(f"{finding.mutant}: kind {at}: {finding.failure.signature}: {finding.target}\n")
        sys.stdout.flush()
        yield at


def _kinds_in(sorter: Sorter, findings: Iterable[Finding]) -> Iterator[int]:
    """Sort failures; yield the number of each one's kind."""
    for finding in findings:
        before = [kind.seen for kind in sorter.kinds]
        sorter.sort(finding)
        yield next((at for at, seen in enumerate(before) if sorter.kinds[at].seen != seen), len(before))


def _write(
    options: argparse.Namespace, findings: Sequence[Finding], kinds: Sequence[int], known: Sequence[str]
) -> None:
    """Replace this adapter's rows in the file, and write the page from all rows."""
    file, adapter = _TABLES / "sorting.jsonl", adapter_named(options.adapter)
    assert isinstance(adapter, SchedulerAdapter), "only such adapters have known defects"
    counted = Counter(
        (one.mutant or "", kind, one.failure.signature, row)
        for one, kind, row in zip(findings, kinds, known, strict=True)
    )
    lines = file.read_bytes().splitlines() if file.is_file() else []
    rows = [msgspec.json.decode(line, type=Sorted) for line in lines]
    release = f"{options.adapter} {adapter.version()}"
    rows = [one for one in rows if one.release.split()[0] != options.adapter]
    rows += [
        Sorted(
            release=release, defect=defect, kind=kind, signature=signature, failures=count, seed=options.seed, known=row
        )
        for (defect, kind, signature, row), count in sorted(counted.items())
    ]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    (_TABLES / "sorting.md").write_text(page_of(rows), encoding="utf-8")


def page_of(rows: Sequence[Sorted]) -> str:
    """Format the page from the rows of all releases."""
    about = (
        "The known [defects](defects.md), each found in several variants of its schedule: with other numbers, other "
        "sizes of the pool and further requests. All failures of a release are sorted as in `scripted explore`, "
        "but with none of them known, and every pair is judged: two failures of one defect in two kinds are wrongly "
        "parted, two failures of two defects in one kind are wrongly joined. The last columns count these among the "
        "pairs of one kind. By text, two failures are of one kind if their texts are equal without names and numbers. "
        "The sorter's thresholds were chosen on variants of the seeds 1 and 47. "
        "`python -m benchmarks.sorting --defects` measures the installed release again."
    )
    if_known = (
        "The same failures when all defects of the release are known, as in a user's search: a failure belongs to the "
        "defect whose fix takes it away, or else to the one that explains it."
    )
    heads = [f"| release | seed | defects | failures {_HEADS}|", "| --- " + "| ---: " * 12 + "|"]
    releases = dict.fromkeys(one.release for one in rows)
    parts = ["# Sorting by cause", "", *textwrap.wrap(about, _COLUMNS), "", *heads]
    parts += [_summary([one for one in rows if one.release == release]) for release in releases]
    parts += ["", *textwrap.wrap(if_known, _COLUMNS), ""]
    parts += ["| release | failures | sorted into their defect | into another | new |", "| --- " + "| ---: " * 4 + "|"]
    parts += [_known_summary([one for one in rows if one.release == release]) for release in releases]
    for release in releases:
        own = [one for one in rows if one.release == release]
        parts += ["", f"## {release}", "", "| defect | failures | kinds, with their other defects |"]
        parts += ["| --- | ---: | --- |", *(_line(defect, own) for defect in dict.fromkeys(one.defect for one in own))]
    return "\n".join([*parts, ""])


def _summary(rows: Sequence[Sorted]) -> str:
    each = [one for one in rows for _ in range(one.failures)]
    bugs = [one.defect for one in each]
    cause, text = judge(bugs, [one.kind for one in each]), judge(bugs, [one.signature for one in each])
    cells = [rows[0].release, rows[0].seed, len(set(bugs)), f"{len(each):,}"]
    for pairs, wrong, by_text in (
        (cause.of_one_bug, cause.parted, text.parted),
        (cause.of_two_bugs, cause.joined, text.joined),
    ):
        cells += [f"{pairs:,}", f"{wrong / max(1, pairs):.1%}", f"{by_text / max(1, pairs):.1%}"]
    shares = (one.joined / max(1, one.of_one_kind) for one in (cause, text))
    cells += [f"{cause.of_one_kind:,}", *(f"{share:.1%}" for share in shares)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _known_summary(rows: Sequence[Sorted]) -> str:
    each = [one for one in rows for _ in range(one.failures)]
    right, new = sum(one.known == one.defect for one in each), sum(not one.known for one in each)
    return f"| {rows[0].release} | {len(each)} | {right} | {len(each) - right - new} | {new} |"


def _line(defect: str, rows: Sequence[Sorted]) -> str:
    kinds = Counter[int]()
    for one in rows:
        kinds[one.kind] += one.failures if one.defect == defect else 0
    said = []
    for kind, count in kinds.most_common():
        others = sorted({one.defect for one in rows if one.kind == kind} - {defect})
        said += [f"{count}" + (f" ({', '.join(others)})" if others else "")] if count else []
    return f"| {defect} | {sum(kinds.values())} | {', '.join(said)} |"


if __name__ == "__main__":
    with interruptible("benchmarks.sorting"):
        main()
