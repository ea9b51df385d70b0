"""The replicas that a router knows, and how loaded it believes each to be.

Owns the estimate: what a replica reported, corrected by what this router has sent and seen end since. Chooses nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

# What orders replicas: weight, pending prefill tokens, free pages (more is better), how long ago it was chosen.
Rank = tuple[int, int, int, int]

# The heap is built again when it has this many entries for each replica; most of them are out of date by then.
_ENTRIES_A_REPLICA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica reports of itself: counts of requests, tokens still to be prefilled, pages that are free."""

    running: int = 0
    waiting: int = 0
    pending_prefill_tokens: int = 0
    free_pages: int = 0


@dataclass(eq=False, slots=True)
class _Member:
    capacity: int
    joined_at: int
    # Both are numbers of turns, ``joined_at`` at first.
    report_number: int
    turn: int
    accepting: bool = True
    reported: int = 0
    pending: int = 0
    free_pages: int = 0
    own: int = 0
    own_at_report: int = 0
    weight: int = 0
    version: int = 0
    is_counted: bool = False

    @property
    def open(self) -> int:
        """Requests that it has: never fewer than this router sent there."""
        return max(self.own, self.reported + self.own - self.own_at_report)


class Fleet:
    """Loads by replica. ``total_weight`` and ``available`` are of the replicas that can take a request.

    A replica weighs one for each request that it has, and one for each ``tokens_a_request`` tokens that it must still
    prefill. It can take a request while it accepts them and has fewer than its capacity.
    """

    def __init__(self, tokens_a_request: int) -> None:
        self._tokens_a_request = tokens_a_request
        self._members: dict[str, _Member] = {}
        self._heap: list[tuple[Rank, int, str]] = []
        self._turns = 0
        self.total_weight = 0
        self.available = 0

    def join(self, name: str, capacity: int) -> None:
        """Add a replica, idle and accepting; ``capacity`` is the most requests that it takes at once."""
        if name in self._members:
            raise ValueError(f"a replica joins once, got {name!r} again; let it leave first")
        self._turns += 1
        self._members[name] = _Member(capacity, self._turns, self._turns, self._turns)
        self._refresh(name)

    def leave(self, name: str) -> None:
        member = self._members.pop(name)
        self._uncount(member)

    def report(self, name: str, load: ReplicaLoad, *, accepting: bool = True) -> None:
        member = self._members[name]
        member.reported = load.running + load.waiting
        member.pending = load.pending_prefill_tokens
        member.free_pages = load.free_pages
        member.own_at_report = member.own
        self._turns += 1
        member.report_number = self._turns
        member.accepting = accepting
        self._refresh(name)

    def sent(self, name: str, tokens: int) -> int:
        """Count a request that was sent, with the tokens that it must prefill. Returns what ``ended`` wants back."""
        member = self._members[name]
        self._turns += 1
        member.turn = self._turns
        member.own += 1
        member.pending += tokens
        self._refresh(name)
        return member.report_number

    def ended(self, name: str, tokens: int, report_number: int) -> None:
        """Count the end of a request that was sent, unless its replica has left since, even if one came back."""
        member = self._members.get(name)
        if member is None or report_number < member.joined_at:
            return
        member.own -= 1
        # What was sent before the report is in the report, or was prefilled before it.
        if member.report_number == report_number:
            member.pending -= tokens
        self._refresh(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All replicas, in the order in which they joined."""
        return tuple(self._members)

    def is_known(self, name: str) -> bool:
        return name in self._members

    def can_take(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.is_counted

    def accepts(self, name: str) -> bool:
        return self._members[name].accepting

    def weight(self, name: str) -> int:
        return self._members[name].weight

    def in_flight(self, name: str) -> int:
        """Requests that this router has sent there and not seen end."""
        return self._members[name].own

    def rank(self, name: str) -> Rank:
        """The order of replicas: the smaller one is preferred. No two are equal."""
        member = self._members[name]
        return member.weight, member.pending, -member.free_pages, member.turn

    def least_loaded(self, left_out: Container[str] = ()) -> str | None:
        """The replica of the smallest rank among those that can take a request; None when there is none."""
        put_back = []
        found = None
        while self._heap:
            entry = self._heap[0]
            _, version, name = entry
            member = self._members.get(name)
            if member is None or not member.is_counted or member.version != version:
                heapq.heappop(self._heap)
            elif name in left_out:
                put_back.append(heapq.heappop(self._heap))
            else:
                found = name
                break
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        return found

    def longest_without(self, left_out: Container[str] = ()) -> str | None:
        """The replica that was chosen longest ago among those that can take a request; None when there is none."""
        open_ones = [name for name, member in self._members.items() if member.is_counted and name not in left_out]
        return min(open_ones, key=lambda name: self._members[name].turn, default=None)

    def _refresh(self, name: str) -> None:
        """Bring the sums and the order up to date with one replica."""
        member = self._members[name]
        self._uncount(member)
        # Versions go on over the lives of one name, so that an entry of an earlier life is out of date as well.
        self._turns += 1
        member.version = self._turns
        member.weight = member.open + member.pending // self._tokens_a_request
        if not member.accepting or member.open >= member.capacity:
            return
        member.is_counted = True
        self.available += 1
        self.total_weight += member.weight
        heapq.heappush(self._heap, (self.rank(name), member.version, name))
        if len(self._heap) > _ENTRIES_A_REPLICA * max(8, len(self._members)):
            self._rebuild()

    def _uncount(self, member: _Member) -> None:
        if member.is_counted:
            member.is_counted = False
            self.available -= 1
            self.total_weight -= member.weight

    def _rebuild(self) -> None:
        counted = ((name, member) for name, member in self._members.items() if member.is_counted)
        self._heap = [(self.rank(name), member.version, name) for name, member in counted]
        heapq.heapify(self._heap)
