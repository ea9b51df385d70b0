"""The summary of many scripts: how many outputs were compared, and which scripts may have mistakes.

Counts and words only; knows no pytest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from scripted.core.phrases import plural

# Prefix of the count of outputs that were not compared; the reason follows.
NOT_COMPARED: Final = "not compared: "
# Prefix of the count of runs of one assertion; its place and text follow.
ASKED: Final = "asked: "

# The findings of vetting, and the prefix of an assertion that cannot fail.
NOTICES_NOTHING: Final = "scripts that notice no bug but those that every script notices (`scripted vet` says more)"
NOT_REPEATABLE: Final = "scripts that ran otherwise the second time (seed what is random, take the time from t.clock)"
# Prefix of the count of a parameter that a script never reads.
UNUSED: Final = "parameters that a script never reads: "
NOT_VETTED: Final = "scripts that were not vetted yet (each session vets new ones for a while; --scripted-vet all: all)"
NEVER_FAILS: Final = "never fails: "
# Prefix of the count of servers that a script has changed; the changes follow.
REPLACED: Final = "servers that were replaced, because a script had changed: "

# How many tests are named for each count; ``verbose`` names all.
_NAMED: Final = 3


class SummaryOfScripts:
    """The totals over the scripts of one session, by name. ``scripts`` is their number."""

    def __init__(self) -> None:
        self.scripts = 0
        self._steps = 0
        self._compared = 0
        self._skipped = Counter[str]()
        self._counts = Counter[str]()
        self._tests: dict[str, list[str]] = {}
        self._asked = Counter[str]()
        # The tests of each assertion: a shared helper's assertion belongs to many.
        self._asking: dict[str, list[str]] = {}
        self._never_fail: dict[str, list[str]] = {}

    def add(self, test: str, counts: Mapping[str, int]) -> None:
        """Add the counts of one script: ``steps``, ``compared``, outputs not compared, assertions, loose ends."""
        self.scripts += 1
        self.add_counts(test, counts)

    def add_counts(self, test: str, counts: Mapping[str, int]) -> None:
        """Add vetting counts to a script that was added before."""
        for name, count in counts.items():
            if name == "steps":
                self._steps += count
            elif name == "compared":
                self._compared += count
            elif name.startswith(NOT_COMPARED):
                self._skipped[name.removeprefix(NOT_COMPARED)] += count
            elif name.startswith(NEVER_FAILS):
                self._never_fail.setdefault(name.removeprefix(NEVER_FAILS), []).append(test)
            elif name.startswith(ASKED):
                self._asked[name.removeprefix(ASKED)] += count
                self._asking.setdefault(name.removeprefix(ASKED), []).append(test)
            else:
                self._counts[name] += count
                self._tests.setdefault(name, []).append(test)

    def lines(self, *, verbose: bool = False) -> Iterator[str]:
        """Yield the totals, then a line for each kind of loose end with its tests."""
        yield (
            f"{plural(self.scripts, 'script')}, {plural(self._steps, 'step')}, "
            f"{plural(self._compared, 'output')} compared with the same request run alone"
        )
        if self._skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._skipped.items()))
            yield f"not compared: {reasons}"
        for name, count in sorted(self._counts.items()):
            tests = self._tests[name]
            yield f"{name}: {count}, in {plural(len(tests), 'script')}:"
            yield from _named(tests, "    ", verbose=verbose)
        if self._never_fail:
            yield f"assertions that can never fail: {len(self._never_fail)}"
            for assertion, tests in sorted(self._never_fail.items()):
                yield f"    {assertion}, in"
                yield from _named(tests, "        ", verbose=verbose)
        if never := sorted(assertion for assertion, count in self._asked.items() if not count):
            yield f"assertions that no run of these scripts reached: {len(never)}"
            for assertion in never:
                yield f"    {assertion}, in"
                yield from _named(self._asking[assertion], "        ", verbose=verbose)


def _named(tests: Sequence[str], indent: str, *, verbose: bool) -> Iterator[str]:
    named = tests if verbose else tests[:_NAMED]
    yield from (f"{indent}{test}" for test in named)
    if more := len(tests) - len(named):
        yield f"{indent}and {more} more (-v names them)"
