"""The score: what share of the mutants each suite noticed, and which are left. It judges no survivor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from rich.table import Table

from tools.mutation.campaign import Result, Verdict
from tools.mutation.operators import Mutant
from tools.mutation.suites import Suite

__all__ = ["Row", "Score", "score_of", "survivors_of", "table_of"]

_NOTICED: Final = (Verdict.KILLED, Verdict.TIMEOUT)
_UNION: Final = "any"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One suite on one kind of mutant: ``of`` mutants, ``noticed`` of them; ``timeouts`` are among those."""

    kind: str
    suite: str
    of: int
    noticed: int
    timeouts: int
    unreached: int

    @property
    def share(self) -> float:
        """Noticed of all, from 0 to 1."""
        return self.noticed / self.of if self.of else 0.0


class Score(msgspec.Struct, frozen=True):
    """All rows; ``left_out`` mutants compiled to the code that was there."""

    rows: tuple[Row, ...]
    left_out: int


def score_of(mutants: Sequence[Mutant], results: Iterable[Result]) -> Score:
    """Count. A mutant counts for a suite when it was tried there."""
    found = _table(results)
    same = {name for name, by_suite in found.items() if any(one.verdict is Verdict.SAME for one in by_suite.values())}
    rows = []
    for kind, guard in (("behaviour", False), ("guard", True)):
        tried = [found[one.id] for one in mutants if one.guard is guard and one.id in found and one.id not in same]
        for suite in Suite:
            verdicts = [by_suite[suite].verdict for by_suite in tried if suite in by_suite]
            if verdicts:
                rows.append(_row(kind, suite.value, verdicts))
        if tried:
            rows.append(_row(kind, _UNION, [_best(by_suite.values()) for by_suite in tried]))
    return Score(tuple(rows), sum(1 for one in mutants if one.id in same))


def survivors_of(mutants: Sequence[Mutant], results: Iterable[Result], suite: Suite | None) -> list[Mutant]:
    """Mutants that this suite did not notice; without a suite, that none did."""
    found = _table(results)
    left = []
    for mutant in mutants:
        by_suite = found.get(mutant.id, {})
        looked = list(by_suite.values()) if suite is None else [by_suite[suite]] if suite in by_suite else []
        if looked and not any(one.verdict in (*_NOTICED, Verdict.SAME) for one in looked):
            left.append(mutant)
    return left


def table_of(score: Score) -> Table:
    """For a terminal."""
    table = Table(title="mutants noticed", title_justify="left")
    for name in ("kind", "suite", "mutants", "noticed", "of these by never ending", "never run", "score"):
        table.add_column(name, justify="left" if name in ("kind", "suite") else "right")
    for row in score.rows:
        counts = (row.of, row.noticed, row.timeouts, row.unreached)
        table.add_row(row.kind, row.suite, *map(str, counts), f"{100 * row.share:.1f} %")
    return table


def _table(results: Iterable[Result]) -> dict[str, dict[Suite, Result]]:
    found: dict[str, dict[Suite, Result]] = {}
    for result in results:
        found.setdefault(result.mutant, {})[result.suite] = result
    return found


def _best(results: Iterable[Result]) -> Verdict:
    verdicts = {result.verdict for result in results}
    order = (Verdict.KILLED, Verdict.TIMEOUT, Verdict.SURVIVED, Verdict.UNREACHED)
    return next(verdict for verdict in order if verdict in verdicts)


def _row(kind: str, suite: str, verdicts: Sequence[Verdict]) -> Row:
    return Row(
        kind=kind,
        suite=suite,
        of=len(verdicts),
        noticed=sum(verdict in _NOTICED for verdict in verdicts),
        timeouts=verdicts.count(Verdict.TIMEOUT),
        unreached=verdicts.count(Verdict.UNREACHED),
    )
