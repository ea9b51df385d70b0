"""Grammars of the executable specification: known grammars, their users, and the unused ones that are kept.

Names in bold are the rules of docs/rules.md. This module ends no request.
"""

from __future__ import annotations

from engine.core.messages import Grammar, GrammarReady
from engine.core.plan import GrammarOrder
from scripted_lockstep.specification.request import SpecifiedRequest


class _Known:
    def __init__(self, number: int, grammar: Grammar) -> None:
        self.number, self.grammar, self.is_ready = number, grammar, False
        self.users: list[SpecifiedRequest] = []


class SpecifiedGrammars:
    """Tracks grammars. ``orders`` are this step's orders to the last stage."""

    def __init__(self, kept: int) -> None:
        self.kept, self.numbered = kept, 0
        self.known: list[_Known] = []  # unused ones in the order in which they lost their last user
        self.orders: list[GrammarOrder] = []

    def begin(self, request: SpecifiedRequest, totals: dict[str, int]) -> None:
        """**Grammar**: a known grammar is not compiled again."""
        grammar = request.message.sampling.grammar
        if grammar is None:
            return
        known = next((one for one in self.known if one.grammar == grammar), None)
        if known is None:
            self.numbered += 1
            known = _Known(self.numbered, grammar)
            self.known.append(known)
            self.orders.append(GrammarOrder(known.number, grammar))
        known.users.append(request)
        request.grammar_id = known.number
        totals["grammar_hits"] += known.is_ready

    def startable(self, waiting: list[SpecifiedRequest]) -> list[SpecifiedRequest]:
        """**Grammar**: a request whose grammar is being compiled is neither tried nor overtaken."""
        late = [request for known in self.known if not known.is_ready for request in known.users]
        return [request for request in waiting if request not in late] if late else waiting

    def leave(self, request: SpecifiedRequest) -> None:
        """**Kept**: drop a user that neither lives nor is in flight; the longest unused grammar goes first."""
        if request.end is None or request.owns_memory or not request.grammar_id:
            return
        for known in self.known:
            if request in known.users:
                known.users.remove(request)
                if not known.users:
                    self.known.remove(known)
                    self.known.append(known)
                    self.shrink(self.kept)
                return

    def shrink(self, kept: int) -> None:
        """Forget unused grammars, except the newest ``kept``."""
        unused = [one for one in self.known if not one.users]
        for known in unused[: max(0, len(unused) - kept)]:
            self.known.remove(known)
            self.orders.append(GrammarOrder(known.number, None))

    def answer(self, ready: GrammarReady, totals: dict[str, int]) -> list[SpecifiedRequest]:
        """Return the requests whose grammar cannot be compiled. An answer for a forgotten grammar changes nothing."""
        known = next((one for one in self.known if one.number == ready.grammar_id), None)
        if known is None or known.is_ready:
            return []
        if ready.error is not None:
            self.known.remove(known)
            return [*known.users]
        known.is_ready = True
        totals["grammars_compiled"] += 1
        return []

    def take_orders(self) -> tuple[GrammarOrder, ...]:
        """Take this step's orders to the last stage."""
        if not self.orders:
            return ()
        orders, self.orders = tuple(self.orders), []
        return orders

    def waiting(self) -> int:
        """Return the number of requests that wait for their grammar."""
        return sum([len(one.users) for one in self.known if not one.is_ready])
