"""Measures how well failures are sorted by cause: ``python -m benchmarks.sorting [--defects] [--each 10]``.

Each bug of the gallery is found in several schedules; with ``--defects``, each known defect of the installed release is
found in variants of its schedules. The sorter of ``scripted explore`` gets all of these failures, and every pair is
judged: two failures of one bug in two kinds are wrongly split, two failures of two bugs in one kind are wrongly joined.
The same numbers are given for sorting by the failures' texts, without names and numbers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.defects import Defect, defects_of
from scripted.core.mutant import mutant_names_of, switched_on
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign
from scripted.search.execution import execute
from scripted.search.generated import first_of
from scripted.search.kinds import Sorter, parts_of, restricted
from scripted.search.mutant_search import adapter_of
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

__all__ = ["Judged", "judge", "main"]

# The process time for all schedules of one bug.
_SEARCH_S: Final = 20.0
_SCHEDULES: Final = 300
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

    def __str__(self) -> str:
        parted, joined = self.parted / max(1, self.of_one_bug), self.joined / max(1, self.of_two_bugs)
        return (
            f"{self.parted:,} of {self.of_one_bug:,} pairs of one bug parted ({parted:.1%}), "
            f"{self.joined:,} of {self.of_two_bugs:,} pairs of two bugs joined ({joined:.1%})"
        )


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

    A variant counts only if it no longer fails once an event or a setting of that schedule is taken out.
    """
    schedule = next((one for one in map(_parsed, defect.schedules) if one is not None and _signature(one)), None)
    if schedule is None or schedule.of != adapter:
        return []
    chance = random.Random(f"{defect.id} {seed}")  # noqa: S311 - which variants are drawn
    found: dict[str, Finding] = {}
    until = time.process_time() + _SEARCH_S
    while len(found) < count and time.process_time() < until:
        variant = _varied(schedule, chance)
        failure = None if variant is None else execute(variant).failure
        if variant is not None and failure is not None and _is_caused_by(schedule, variant):
            found[str(variant)] = Finding(str(variant), (), failure, adapter, defect.id)
    return list(found.values())


def _parsed(text: str) -> Schedule | None:
    try:
        return Schedule.parse(text)
    except (ScriptDefinitionError, ValueError):
        return None


def _signature(schedule: Schedule) -> str:
    """Return how a schedule fails; empty if it passes or makes no run."""
    try:
        failure = execute(schedule).failure
    except (ScriptDefinitionError, HarnessError, ValueError):
        return ""
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
    options = parser.parse_args(arguments)
    findings = list(_of_defects(options) if options.defects else _collected(options))
    # In a search's order, because one bug after another would be easier.
    random.Random(options.seed).shuffle(findings)  # noqa: S311 - an order
    sorter, kinds = Sorter(), list[int]()
    for finding in findings:
        with switched_on(adapter_named(options.adapter), None if options.defects else finding.mutant):
            before = [kind.seen for kind in sorter.kinds]
            sorter.sort(finding)
        at = next((at for at, seen in enumerate(before) if sorter.kinds[at].seen != seen), len(before))
        kinds.append(at)
        sys.stdout.write(f"{finding.mutant}: kind {at}: {finding.failure.signature}\n")
        sys.stdout.flush()
    bugs = [finding.mutant or "" for finding in findings]
    sys.stdout.write(f"by cause: {judge(bugs, kinds)}\n")
    sys.stdout.write(f"by text:  {judge(bugs, [one.failure.signature for one in findings])}\n")


if __name__ == "__main__":
    with interruptible("benchmarks.sorting"):
        main()
