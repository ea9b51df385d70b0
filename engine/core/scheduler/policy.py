"""The policies: the order in which waiting requests are offered memory, and the bound on overtaking.

A policy orders; it never admits. Ties are broken by arrival, so that every order is total and deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

from engine.core.memory import KVMemory
from engine.core.scheduler.request import Request

# A waiting request may be overtaken by this many later ones; then it takes its turn by arrival.
OVERTAKEN_LIMIT_REQUESTS: Final = 16
# Matching a waiting prompt against the tree costs a walk; a queue longer than this is served by arrival.
LPM_QUEUE_LIMIT_REQUESTS: Final = 128


class Policy(ABC):
    """An order, and its bound on overtaking.

    A request is *overtaken* when a later arrival starts while it waits; ``Request.overtaken`` counts this since its own
    last start. An *overdue* request goes before all others, and while it does not fit, no other may start.
    """

    @abstractmethod
    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        """Sort the waiting requests, given in order of arrival, in the order in which they are tried."""

    def is_overdue(self, request: Request) -> bool:
        """Return whether a waiting request was overtaken as often as the bound allows."""
        return request.overtaken >= OVERTAKEN_LIMIT_REQUESTS

    def overtaken_by(self, started: Request, waiting: Sequence[Request]) -> Iterator[Request]:
        """Yield the requests of a queue, in order of arrival, that this start overtakes: all that came before."""
        for request in waiting:
            if request.arrival > started.arrival:
                return
            yield request


class FirstCome(Policy):
    """First come, first served. A request is overtaken only while it does not fit."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:  # noqa: ARG002
        return waiting


class LongestPrefix(Policy):
    """The prompt with the most cached tokens goes first."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        """Order by cached tokens, or by arrival if the queue is too long for that."""
        if len(waiting) > LPM_QUEUE_LIMIT_REQUESTS:
            return waiting
        cached = {
            one: 0 if self.is_overdue(one) else -memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key)
            for one in waiting
        }
        return sorted(waiting, key=lambda one: (not self.is_overdue(one), cached[one], one.arrival))


class DepthFirst(Policy):
    """Groups prompts by shared cached prefix, beginning with the prefix that most requests share."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        """Order by a walk through the tree, or by arrival if the queue is too long for that."""
        if len(waiting) > LPM_QUEUE_LIMIT_REQUESTS:
            return waiting
        due = [one for one in waiting if self.is_overdue(one)]
        return due + depth_first([one for one in waiting if not self.is_overdue(one)], memory)


def depth_first(waiting: Sequence[Request], memory: KVMemory) -> list[Request]:
    """Sort requests, given in order of arrival, by a depth-first walk through the prefix tree, heaviest child first.

    The weight of a node is the number of requests that hit it; among equal children the one of the earliest request
    goes first. A request that hits more of a prefix comes before a request that hits less; requests without a hit come
    last.
    """
    hits = {one: memory.cached_nodes(one.ids, one.hit_limit_tokens, one.kv_key) for one in waiting}
    weight: dict[int, int] = {}
    first: dict[int, int] = {}
    for one, nodes in hits.items():
        for node, _ in nodes:
            weight[node] = weight.get(node, 0) + 1
            first.setdefault(node, one.arrival)

    def key(one: Request) -> list[tuple[int, int, int]]:
        nodes = hits[one]
        # Every node has a weight, so a walk that continues sorts before one that ends.
        end = 0, -sum([pages for _, pages in nodes]), one.arrival
        return [*[(-weight[node], first[node], 0) for node, _ in nodes], end]

    return sorted(waiting, key=key)


class HighestPriority(Policy):
    """The highest number goes first.

    The bound protects only the request that has waited longest: of a backlog of low priority at most every seventeenth
    start is out of turn, so that urgent requests stay urgent.
    """

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:  # noqa: ARG002
        return sorted(waiting, key=lambda one: (not self.is_overdue(one), -one.priority, one.arrival))

    def overtaken_by(self, started: Request, waiting: Sequence[Request]) -> Iterator[Request]:
        """Yield the longest-waiting request, if it arrived earlier."""
        if waiting and waiting[0].arrival < started.arrival:
            yield waiting[0]


_POLICIES: Final[dict[str, Policy]] = {
    "fcfs": FirstCome(),
    "lpm": LongestPrefix(),
    "priority": HighestPriority(),
    "dfs-weight": DepthFirst(),
}


def policy_named(name: str) -> Policy:
    """Return the policy with this name. Raises KeyError for a name that the configuration should have refused."""
    return _POLICIES[name]
