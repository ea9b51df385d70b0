"""The routing policies that are compared, one interface for all.

Owns the information that each policy gets; the prefix policy itself is the engine's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from benchmarks.routing.workload import CHUNK_TOKENS
from engine.core.routing.placement import Placement, Prompt, Refused, ReplicaLoad, Rules, Ticket

__all__ = ["POLICIES", "Policy"]

_NO_BOUND: Final = 10**9


class Policy(Protocol):
    """Chooses a replica for each request."""

    def choose(self, chain: Sequence[int], tokens: int) -> tuple[int, object]:
        """The replica's number, and what ``ended`` is to be told."""
        ...

    def ended(self, replica: int, ticket: object) -> None:
        """Learn that a request has ended."""
        ...

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Learn what a replica says of itself."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, replicas: int, index_chunks: int, seed: int) -> None:  # noqa: ARG002 - all are made alike
        self._replicas = replicas
        self._next = -1

    def choose(self, chain: Sequence[int], tokens: int) -> tuple[int, object]:  # noqa: ARG002
        self._next = (self._next + 1) % self._replicas
        return self._next, None

    def ended(self, replica: int, ticket: object) -> None:
        """Keep nothing."""

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Keep nothing."""


class TwoChoices:
    """The one with fewer requests of two drawn at random; the counts are exact."""

    def __init__(self, replicas: int, index_chunks: int, seed: int) -> None:  # noqa: ARG002
        self._open = [0] * replicas
        self._draw = random.Random(seed).random  # noqa: S311 - a simulation

    def choose(self, chain: Sequence[int], tokens: int) -> tuple[int, object]:  # noqa: ARG002
        count = len(self._open)
        first, second = int(self._draw() * count), int(self._draw() * count)
        chosen = second if self._open[second] < self._open[first] else first
        self._open[chosen] += 1
        return chosen, None

    def ended(self, replica: int, ticket: object) -> None:  # noqa: ARG002
        self._open[replica] -= 1

    def report(self, replica: int, load: ReplicaLoad) -> None:
        """Keep nothing: what was sent and ended says it all."""


class Prefix:
    """The engine's policy, in one router or in several that know nothing of one another's requests."""

    def __init__(
        self, replicas: int, index_chunks: int, seed: int, rules: Rules | None = None, routers: int = 1
    ) -> None:
        self._routers = [
            Placement(rules or Rules(), index_chunks=index_chunks, seed=seed + number) for number in range(routers)
        ]
        self._names = [f"r{number}" for number in range(replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for router in self._routers:
            for name in self._names:
                router.join(name, _NO_BOUND)
        self._turn = 0

    def choose(self, chain: Sequence[int], tokens: int) -> tuple[int, object]:
        self._turn = (self._turn + 1) % len(self._routers)
        router = self._routers[self._turn]
        ticket = router.place(Prompt(chain=chain, tokens=tokens, tokens_a_chunk=CHUNK_TOKENS))
        assert not isinstance(ticket, Refused), ticket
        return self._numbers[ticket.replica], (router, ticket)

    def ended(self, replica: int, ticket: object) -> None:  # noqa: ARG002
        assert isinstance(ticket, tuple)
        router, sent = ticket
        assert isinstance(sent, Ticket)
        router.ended(sent)

    def report(self, replica: int, load: ReplicaLoad) -> None:
        for router in self._routers:
            router.report(self._names[replica], load)


def _unbounded(replicas: int, index_chunks: int, seed: int) -> Policy:
    return Prefix(replicas, index_chunks, seed, Rules(balance_percent=100, balance_slack=_NO_BOUND))


def _four_routers(replicas: int, index_chunks: int, seed: int) -> Policy:
    return Prefix(replicas, index_chunks, seed, routers=4)


POLICIES: Final[dict[str, Callable[[int, int, int], Policy]]] = {
    "round-robin": RoundRobin,
    "two choices": TwoChoices,
    "prefix, no bound": _unbounded,
    "prefix": Prefix,
    "prefix, 4 routers": _four_routers,
}
