"""Mutants: small switches that put a real engine's bug back, one condition at a time.

A mutant is applied from the harness, in the process that runs the scheduler, and taken back afterwards; the engine's
own code holds no switch and no bug.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.scheduler import Books

__all__ = ["MUTANTS", "Mutant", "UnknownMutant", "mutant_named"]


class UnknownMutant(ValueError):  # noqa: N818 - it reads as what happened
    """No mutant has this name."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug: ``owner.attribute`` becomes ``replacement``; the failure that this causes shows ``signature``."""

    name: str
    origin: str
    bug: str
    signature: str
    test: str
    owner: type
    attribute: str
    replacement: Any

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Put the bug in for as long as this is open."""
        original = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.replacement)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


def _always(value: object) -> property:
    getter: Callable[[object], object] = lambda _: value  # noqa: E731 - a property takes a function
    return property(getter)


MUTANTS = (
    Mutant(
        name="flush-ignores-in-flight",
        origin="SGLang pull request 27446",
        bug="the idle check does not see microbatches in flight, so a flush is accepted while a result is on its way",
        signature="This request holds the node from another tree",
        test="tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight",
        owner=Books,
        attribute="nothing_in_flight",
        replacement=_always(True),
    ),
)


def mutant_named(name: str) -> Mutant:
    """The mutant of this name. Raises UnknownMutant with the nearest names."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    known = [mutant.name for mutant in MUTANTS]
    near = difflib.get_close_matches(name, known, n=1)
    raise UnknownMutant(
        f"no mutant is called {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {known}")
    )
