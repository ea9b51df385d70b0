"""The policy: the replica that holds the longest prefix of a request, among those that are not too loaded.

Cache affinity that yields to a bound on imbalance is SGLang's router's; the bound relative to the mean is that of
consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), which KubeAI routes by. A pure function.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain as joined
from itertools import groupby
from operator import itemgetter

from engine.routing.fleet import Fleet
from engine.routing.index import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the policy.

    A replica keeps its prefixes' requests while it weighs at most ``balance_percent`` of the mean, or ``balance_slack``
    requests more than the mean, whichever is more. Of more than ``holders_seen`` holders of a prefix that many are
    looked at. Without ``by_prefix`` replicas take turns, whatever they hold and however loaded they are.
    """

    balance_percent: int = 125
    balance_slack: int = 4
    tokens_a_request: int = 2048
    holders_seen: int = 32
    by_prefix: bool = True

    def __post_init__(self) -> None:
        least = {"balance_percent": 100, "balance_slack": 0, "tokens_a_request": 1, "holders_seen": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}; raise it")

    def heaviest(self, fleet: Fleet) -> int:
        """The most that a replica may weigh to be chosen for what it holds."""
        mean = fleet.total_weight // fleet.available
        return max(fleet.total_weight * self.balance_percent // (100 * fleet.available), mean + self.balance_slack)


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and how many chunks of the request's prefix it probably holds."""

    replica: str
    held_chunks: int


class Refused(Enum):
    """Why there is no replica for a request."""

    FULL = "every replica that accepts requests has as many as it takes"
    NONE = "no replica accepts requests"


def choose(
    chain: Sequence[int],
    fleet: Fleet,
    index: PrefixIndex,
    rules: Rules,
    *,
    held: Mapping[str, int] | None = None,
    left_out: Collection[str] = (),
    seed: int = 0,
) -> Choice | Refused:
    """The replica for a prompt with these chunk hashes. Equal inputs, equal choices; nothing is changed.

    ``held`` are the chunks that replicas have by their own words; the others are looked up in the index.

    A replica that is draining, unhealthy or full is never chosen, nor one that is ``left_out``. Of replicas that hold
    equally much, the one of the smaller rank is: weight, pending tokens, free pages, longest without a request. Where
    none that holds anything is light enough, the least loaded replica takes the request.
    """
    if fleet.available and not rules.by_prefix:
        next_one = fleet.longest_without(left_out)
        if next_one is not None:
            return Choice(next_one, 0)
    elif fleet.available:
        heaviest = rules.heaviest(fleet)
        for length, holders in _longest_first(chain, index, held or {}):
            seen = _seen(holders, rules.holders_seen, (chain[-1] if chain else 0) ^ seed)
            fit = [
                name
                for name in seen
                if name not in left_out and fleet.can_take(name) and fleet.weight(name) <= heaviest
            ]
            if fit:
                return Choice(min(fit, key=fleet.rank), length)
        least = fleet.least_loaded(left_out)
        if least is not None:
            return Choice(least, 0)
    accepting = any(fleet.accepts(name) for name in fleet.names if name not in left_out)
    return Refused.FULL if accepting else Refused.NONE


def _longest_first(
    chain: Sequence[int], index: PrefixIndex, held: Mapping[str, int]
) -> Iterator[tuple[int, Sequence[str]]]:
    """The prefixes that any replica holds, longest first, by the index and by the replicas' own words."""
    told = sorted(((length, (name,)) for name, length in held.items() if length), reverse=True)
    if not told:
        yield from index.longest_first(chain)
        return
    both = heapq.merge(told, index.longest_first(chain), key=itemgetter(0), reverse=True)
    for length, found in groupby(both, key=itemgetter(0)):
        yield length, [name for _, names in found for name in names]


def _seen(holders: Sequence[str], most: int, draw: int) -> Sequence[str]:
    """At most ``most`` holders of a prefix, from a place that the request draws, so that none is always first."""
    if len(holders) <= most:
        return holders
    start = draw % len(holders)
    end = start + most
    return tuple(joined(holders[start:end], holders[: max(0, end - len(holders))]))
