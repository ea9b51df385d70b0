"""One router's memory: its replicas, its index, and the requests that it has sent and not seen end.

Owns the order of the updates, so that the next choice knows of this one. Sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.routing.fleet import Fleet, ReplicaLoad
from engine.routing.index import PrefixIndex
from engine.routing.policy import Choice, Refused, Rules, choose


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was routed; handed back when it has ended."""

    replica: str
    held_chunks: int
    tokens: int
    report_number: int


class PrefixRouter:
    """Routes requests one by one. ``index_chunks`` bounds what is remembered of each replica."""

    def __init__(self, rules: Rules, *, index_chunks: int, seed: int = 0) -> None:
        self._rules = rules
        self._seed = seed
        self.fleet = Fleet(rules.tokens_a_request)
        self.index = PrefixIndex(index_chunks)

    def route(
        self, chain: Sequence[int], tokens: int, *, tokens_a_chunk: int, left_out: Collection[str] = ()
    ) -> Ticket | Refused:
        """Choose a replica for a prompt of about ``tokens`` tokens, and count the request as sent there."""
        choice = choose(chain, self.fleet, self.index, self._rules, left_out=left_out, seed=self._seed)
        if not isinstance(choice, Choice):
            return choice
        to_compute = max(0, tokens - choice.held_chunks * tokens_a_chunk)
        report_number = self.fleet.sent(choice.replica, to_compute)
        self.index.add(choice.replica, chain)
        return Ticket(choice.replica, choice.held_chunks, to_compute, report_number)

    def ended(self, ticket: Ticket) -> None:
        """Take a request's end into account, whatever it was."""
        self.fleet.ended(ticket.replica, ticket.tokens, ticket.report_number)

    def join(self, name: str, capacity: int) -> None:
        """Add a replica, with an empty cache."""
        self.fleet.join(name, capacity)

    def leave(self, name: str) -> None:
        """Remove a replica and all that is known of it."""
        self.fleet.leave(name)
        self.index.forget(name)

    def report(self, name: str, load: ReplicaLoad, *, accepting: bool = True, is_flushed: bool = False) -> None:
        """Take over a replica's report. One with ``is_flushed`` says that nothing is cached there any more."""
        self.fleet.report(name, load, accepting=accepting)
        if is_flushed:
            self.index.forget(name)
