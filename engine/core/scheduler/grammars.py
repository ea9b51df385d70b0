"""Grammars: the users of each, whether it is compiled, and the unused ones that are kept.

Orders the last stage to compile and to forget them. A request waits for its grammar's ``GrammarReady`` and holds up no
other request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.errors import IntegrityError
from engine.core.messages import Generate, Grammar, GrammarReady
from engine.core.plan import GrammarOrder
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.ports import StepShare
from engine.core.scheduler.request import Request


@dataclass(slots=True, eq=False)
class KnownGrammar:
    """A grammar and its id on the last stage. ``users`` are requests that are alive or in flight."""

    id: int
    grammar: Grammar
    is_ready: bool = False
    users: dict[Request, None] = field(default_factory=dict)


class Grammars(Feature):
    """At most ``max_cached_grammars`` unused grammars stay compiled; the least recently used one is dropped first."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept = core.limits.max_cached_grammars
        self._counters = core.counters
        # The grammar of each request that has one, until the request is gone.
        self._of: dict[Request, KnownGrammar] = {}
        self._by_text: dict[Grammar, KnownGrammar] = {}
        self._by_id: dict[int, KnownGrammar] = {}
        # In the order in which they became unused.
        self._unused: dict[int, KnownGrammar] = {}
        self._last_id = 0
        self._compiling = 0
        self._orders: list[GrammarOrder] = []

    # -- looking --

    @property
    def known(self) -> int:
        """The number of grammars that are compiled or being compiled."""
        return len(self._by_id)

    @property
    def entries(self) -> Sequence[KnownGrammar]:
        return tuple(self._by_id.values())

    def is_waited_for_by(self, request: Request) -> bool:
        """Return whether a request has a grammar that is not compiled yet."""
        known = self._of.get(request)
        return known is not None and not known.is_ready

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their grammar."""
        return sum([len(one.users) for one in self._by_id.values() if not one.is_ready]) if self._compiling else 0

    def startable(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Return the requests of a queue that do not wait for a grammar, in its order."""
        if not self._compiling:
            return waiting
        return [request for request in waiting if request not in self._of or self._of[request].is_ready]

    # -- requests come and go --

    def enter(self, request: Request, message: Generate) -> None:
        if message.sampling.grammar is not None:
            self.take(request, message.sampling.grammar)

    def take(self, request: Request, grammar: Grammar) -> None:
        """Give an entering request its grammar, which is known or will be compiled."""
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
        self._of[request] = known
        request.needs_history = True
        request.spec = msgspec.structs.replace(request.spec, grammar_id=known.id)

    def forget(self, request: Request) -> None:
        known = self._of.pop(request, None)
        if known is None:
            return
        del known.users[request]
        if not known.users and known.id in self._by_id:
            self._unused[known.id] = known
            self._shrink(self._kept)

    def flush(self) -> None:
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

    # -- the last stage --

    def report(self, share: StepShare) -> bool:
        """Order the last stage to compile and to forget. Its answers are events, so no further step is due."""
        if self._orders:
            share["grammars"] = tuple(self._orders)
            self._orders.clear()
        return False

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {GrammarReady: self._on_grammar_ready}

    def _on_grammar_ready(self, ready: GrammarReady) -> None:
        for request in self.on_ready(ready):
            self._core.end(request, ready.reason, error=ready.error)

    def on_ready(self, ready: GrammarReady) -> Sequence[Request]:
        """Note that a grammar is compiled, or cannot be; returns the requests that end with its error.

        A grammar that was dropped in the meantime changes nothing.
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

    # -- statistics, audit, checkpoint --

    def stats(self) -> dict[str, int]:
        return {"waiting_for_grammar": self.waiting}

    def check(self, live: Sequence[Request]) -> None:
        """Check that every request is a user of its grammar until it is gone, and recount every number and index."""
        if not self._by_id and not self._of and not self._compiling:
            return
        compiling = sum([not one.is_ready for one in self.entries])
        if compiling != self._compiling:
            raise IntegrityError(f"{compiling} grammars are being compiled, but {self._compiling} are counted")
        if {one.grammar: one for one in self.entries} != self._by_text:
            raise IntegrityError(f"the grammars {list(self._by_id)} are known by id, {list(self._by_text)} by text")
        if {one.id for one in self.entries if not one.users} != self._unused.keys():
            raise IntegrityError(
                f"the grammars {list(self._unused)} are kept as unused, but these are not all the grammars without a "
                "user"
            )
        users = {request: known for known in self.entries for request in known.users}
        owed = {request: self._of[request] for request in live if request in self._of}
        if users != owed:
            raise IntegrityError(f"the users of grammars are {list(users)}, but {list(owed)} have a grammar")

    def snapshot(self, parts: CheckpointParts) -> None:
        """Add the last id and the kept grammars, in the order in which they became unused."""
        parts["last_grammar"] = self._last_id
        parts["grammars"] = tuple([(one.id, one.grammar, one.is_ready) for one in self._unused.values()])

    def restore(self, checkpoint: Checkpoint) -> None:
        self._last_id = checkpoint.last_grammar
        for number, grammar, is_ready in checkpoint.grammars:
            known = KnownGrammar(number, grammar, is_ready)
            self._by_text[grammar] = self._by_id[number] = self._unused[number] = known
            self._compiling += not is_ready
