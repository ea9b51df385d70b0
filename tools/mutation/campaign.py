"""A campaign: every mutant against every suite, in the order in which most of them die soonest.

Each result is written as soon as it is known, so that a campaign that was stopped goes on where it was.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from tools.mutation.children import Ended, run_children, unit_time_limit
from tools.mutation.healthy import Healthy, runs
from tools.mutation.operators import Mutant
from tools.mutation.suites import Suite, Unit
from tools.mutation.switch import switch_on

__all__ = ["Result", "Verdict", "pursue", "read_results"]

_TEXT_LIMIT_CHARACTERS: Final = 300


class Verdict(StrEnum):
    """What became of a mutant: noticed, noticed by never ending, not noticed, never run, or the same code."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"
    UNREACHED = "unreached"
    SAME = "same"


class Result(msgspec.Struct, frozen=True):
    """One mutant against one suite; ``by`` is the unit that noticed it, ``units`` how many were tried."""

    mutant: str
    suite: Suite
    verdict: Verdict
    by: str = ""
    text: str = ""
    units: int = 0
    cpu_s: float = 0.0


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child says: that it begins a unit, or what came of it."""

    unit: str = ""
    failure: str | None = None
    same: bool = False
    done: bool = False


def read_results(file: Path) -> list[Result]:
    """What earlier campaigns have found; the last line may be torn."""
    if not file.exists():
        return []
    results = []
    for line in file.read_bytes().splitlines():
        try:
            results.append(msgspec.json.decode(line, type=Result))
        except msgspec.DecodeError:
            continue
    return results


def pursue(
    mutants: Sequence[Mutant],
    units: Sequence[Unit],
    healthy: Sequence[Healthy],
    *,
    done: Iterable[Result],
    jobs: int,
    found: Callable[[Result], None],
) -> None:
    """Run what is not done yet; ``found`` hears of each result."""
    campaign = _Campaign(units, healthy)
    over = {(result.mutant, result.suite) for result in done}
    suites = list(dict.fromkeys(unit.suite for unit in units))
    wanted = [(mutant, suite) for mutant in mutants for suite in suites if (mutant.id, suite) not in over]
    reached = []
    for mutant, suite in wanted:
        if campaign.reaches(mutant, suite):
            reached.append((mutant, suite))
        else:
            found(Result(mutant.id, suite, Verdict.UNREACHED))
    tasks = (campaign.task(mutant, suite) for mutant, suite in reached)
    for number, ended in run_children(tasks, jobs):
        mutant, suite = reached[number]
        found(campaign.verdict(mutant, suite, ended))


class _Campaign:
    """Which units to try on which mutant, the deadliest and fastest first."""

    def __init__(self, units: Sequence[Unit], healthy: Sequence[Healthy]) -> None:
        self._units = [(unit, one) for unit, one in zip(units, healthy, strict=True) if one.failure is None]
        self._kills: Counter[str] = Counter()

    def reaches(self, mutant: Mutant, suite: Suite) -> bool:
        return any(unit.suite == suite and runs(one, mutant) for unit, one in self._units)

    def task(self, mutant: Mutant, suite: Suite) -> Callable[[Callable[[bytes], None]], None]:
        chosen = [(unit, one) for unit, one in self._units if unit.suite == suite and runs(one, mutant)]
        chosen.sort(key=lambda pair: (0.01 + pair[1].seconds) / (1 + self._kills[pair[0].name]))
        return lambda say: _try(mutant, chosen, say)

    def verdict(self, mutant: Mutant, suite: Suite, ended: Ended) -> Result:
        words = [msgspec.json.decode(line, type=_Word) for line in ended.said.splitlines()]
        last = words[-1] if words else _Word()
        tried = sum(1 for word in words if word.unit and word.failure is None)
        if last.same:
            verdict = Verdict.SAME
        elif last.failure is not None:
            verdict = Verdict.KILLED
        elif last.done:
            verdict = Verdict.SURVIVED
        else:
            verdict = (
                Verdict.TIMEOUT if ended.signal in (signal.SIGPROF, signal.SIGALRM, signal.SIGKILL) else Verdict.KILLED
            )
        by = last.unit if verdict in (Verdict.KILLED, Verdict.TIMEOUT) else ""
        self._kills[by] += 1
        text = (last.failure or (f"ended by signal {ended.signal}" if by else ""))[:_TEXT_LIMIT_CHARACTERS]
        return Result(mutant.id, suite, verdict, by, text, tried, round(ended.cpu_s, 3))


def _try(mutant: Mutant, chosen: Sequence[tuple[Unit, Healthy]], say: Callable[[bytes], None]) -> None:
    def word(said: _Word) -> None:
        say(msgspec.json.encode(said) + b"\n")

    if not switch_on(mutant):
        word(_Word(same=True))
        return
    for unit, healthy in chosen:
        word(_Word(unit.name))
        with unit_time_limit(healthy.seconds):
            try:
                failure = unit.run()
            except Exception as exc:  # noqa: BLE001 - whatever a broken engine raises is the finding
                failure = f"{type(exc).__name__}: {exc}"
        if failure is not None:
            word(_Word(unit.name, failure))
            return
    word(_Word(done=True))
