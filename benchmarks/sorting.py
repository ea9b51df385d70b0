"""How well failures are sorted by their causes: ``python -m benchmarks.sorting [--mutants 20] [--each 10]``.

Bugs of the gallery are each found in several schedules, the sorter of ``scripted explore`` gets all of these failures,
and every pair of them is judged: two of one bug in two kinds are wrongly parted, two of two bugs in one kind wrongly
joined. Beside it stand the same numbers of the failures' texts without names and numbers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import mutant_names_of, switched_on
from scripted.search.campaign import Campaign
from scripted.search.generated import first_of
from scripted.search.kinds import Sorter
from scripted.search.mutant_search import adapter_of
from scripted.search.strategies import StrategyName
from scripted.search.units import Finding, SearchPlan

__all__ = ["Judged", "judge", "main"]

# Of one bug: so much process time for all of its schedules.
_SEARCH_S: Final = 20.0
_SCHEDULES: Final = 300


class Judged(NamedTuple):
    """Pairs of failures, by what sorted them."""

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
    """Judge every pair of failures: by its bug, and by what it was sorted to."""
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
    """Failures of this mutant on so many generated targets; fewer where the time is over."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, sort, judge, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sorting", description=__doc__)
    parser.add_argument("--adapter", default=DEFAULT_ADAPTER)
    parser.add_argument("--mutants", type=int, default=20, help="that are found often enough")
    parser.add_argument("--each", type=int, default=10, help="schedules for each")
    parser.add_argument("--seed", type=int, default=1, help="which mutants and targets are drawn")
    options = parser.parse_args(arguments)
    findings = list(_collected(options))
    # As they come in a search: one bug after the other would be easier.
    random.Random(options.seed).shuffle(findings)  # noqa: S311 - an order
    sorter, kinds = Sorter(), list[int]()
    for finding in findings:
        with switched_on(adapter_named(options.adapter), finding.mutant):
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
