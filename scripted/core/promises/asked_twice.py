"""A query changes nothing: asked twice in a row, it gives the same answer and leaves the scheduler as it was.

Schedulers poll their connectors, caches and admission: a query that counts, pins or moves a cursor works only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol, runtime_checkable

from scripted.core.violation import Violation

# The steps after which a run asks: early ones, while queues fill, and fewer later.
_STEPS: Final = frozenset((3, 8, 21, 55, 144))


@runtime_checkable
class HasQueries(Protocol):
    """A machine with queries that promise to change nothing."""

    def queries(self) -> Mapping[str, Callable[[], object]]:
        """Return the queries that can be asked now, by name; an answer can be compared with another."""
        ...


def check_queries(step: int, machine: HasQueries) -> None:
    """Run every query twice, after certain steps. Raises Violation if the two answers differ."""
    if step not in _STEPS:
        return
    queries = machine.queries()
    answers = {name: ask() for name, ask in queries.items()}
    for name, ask in queries.items():
        again = ask()
        if again != answers[name]:
            raise Violation(f"the query {name} changed something: it answered {answers[name]!r}, and then {again!r}")
