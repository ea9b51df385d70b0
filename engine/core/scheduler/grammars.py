"""The grammars that the engine knows: which requests use each, whether it is compiled, and which are kept unused.

Decides what the last stage is told to compile and to forget. It compiles nothing: a request waits for the event that
says that its grammar is ready, and no other request waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.core.messages import Grammar, GrammarReady
from engine.core.plan import GrammarOrder
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.request import KnownGrammar, Request


class Grammars:
    """At most ``kept`` grammars that no request uses stay compiled; the one that was used longest ago goes first."""

    def __init__(self, kept: int, counters: Counters) -> None:
        self._kept = kept
        self._counters = counters
        self._by_text: dict[Grammar, KnownGrammar] = {}
        self._by_id: dict[int, KnownGrammar] = {}
        # In the order in which they fell out of use.
        self._unused: dict[int, KnownGrammar] = {}
        self._last_id = 0
        self._compiling = 0
        self._orders: list[GrammarOrder] = []

    # -- looking --

    @property
    def known(self) -> int:
        """Grammars that are compiled or being compiled."""
        return len(self._by_id)

    @property
    def entries(self) -> Sequence[KnownGrammar]:
        return tuple(self._by_id.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for their grammar."""
        return sum([len(one.users) for one in self._by_id.values() if not one.is_ready]) if self._compiling else 0

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The requests of a queue that do not wait for a grammar, in its order."""
        if not self._compiling:
            return waiting
        return [request for request in waiting if request.grammar is None or request.grammar.is_ready]

    # -- requests come and go --

    def take(self, request: Request, grammar: Grammar) -> None:
        """A request that has just been admitted uses a grammar: one that is known, or one to be compiled."""
        known = self._by_text.get(grammar)
        if known is None:
            self._last_id += 1
            known = self._by_text[grammar] = self._by_id[self._last_id] = KnownGrammar(self._last_id, grammar)
            self._compiling += 1
            self._orders.append(GrammarOrder(known.id, grammar))
        elif known.is_ready:
            self._counters.grammar_hits += 1
        self._unused.pop(known.id, None)
        known.users[request] = None
        request.grammar = known
        request.spec = msgspec.structs.replace(request.spec, grammar_id=known.id)

    def let_go(self, request: Request) -> None:
        """A request is gone: nothing with it is alive or in flight."""
        known, request.grammar = request.grammar, None
        if known is None:
            return
        del known.users[request]
        if not known.users and known.id in self._by_id:
            self._unused[known.id] = known
            self._shrink(self._kept)

    def forget_unused(self) -> None:
        """Drop every grammar that no request uses."""
        self._shrink(0)

    def _shrink(self, kept: int) -> None:
        while len(self._unused) > kept:
            known = next(iter(self._unused.values()))
            self._drop(known)
            self._orders.append(GrammarOrder(known.id, None))

    def _drop(self, known: KnownGrammar) -> None:
        self._unused.pop(known.id, None)
        del self._by_id[known.id], self._by_text[known.grammar]
        self._compiling -= not known.is_ready

    # -- of an engine that is idle --

    def snapshot(self) -> tuple[int, tuple[tuple[int, Grammar, bool], ...]]:
        """The id that was given last, and what is kept, in the order in which it fell out of use."""
        return self._last_id, tuple([(one.id, one.grammar, one.is_ready) for one in self._unused.values()])

    def become(self, last_id: int, kept: Sequence[tuple[int, Grammar, bool]]) -> None:
        self._last_id = last_id
        for number, grammar, is_ready in kept:
            known = KnownGrammar(number, grammar, is_ready)
            self._by_text[grammar] = self._by_id[number] = self._unused[number] = known
            self._compiling += not is_ready

    # -- the last stage --

    def take_orders(self) -> tuple[GrammarOrder, ...]:
        """What the last stage is to be told now."""
        if not self._orders:
            return ()
        orders, self._orders = tuple(self._orders), []
        return orders

    def on_ready(self, ready: GrammarReady) -> Sequence[Request]:
        """Note that a grammar is compiled, or that it cannot be; returns the requests that end with its error.

        It may have been dropped in the meantime.
        """
        known = self._by_id.get(ready.grammar_id)
        if known is None or known.is_ready:
            return ()
        if ready.error is not None:
            self._drop(known)
            return tuple(known.users)
        known.is_ready = True
        self._compiling -= 1
        self._counters.grammars_compiled += 1
        return ()
