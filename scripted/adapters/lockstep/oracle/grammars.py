"""The account of grammars: who may start when, with which grammar, and what may be forgotten.

It sees only what crosses the gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.messages import Generate, Grammar, GrammarReady
from engine.plan import GrammarOrder, SamplingSpec
from scripted.core.violation import Violation

__all__ = ["GrammarAccount"]


class GrammarAccount:
    """``ready`` are the ids that the last stage has said it can mask with."""

    def __init__(self) -> None:
        self._grammars: dict[int, Grammar] = {}
        self._ready: set[int] = set()

    def answer(self, ready: GrammarReady) -> Grammar | None:
        """Note what the last stage says; the grammar whose requests end with an error, if it is one that is known."""
        if ready.error is None:
            if ready.grammar_id in self._grammars:
                self._ready.add(ready.grammar_id)
            return None
        return self._grammars.pop(ready.grammar_id, None)

    def check_start(self, message: Generate, spec: SamplingSpec) -> None:
        """A request starts. Raises Violation unless it has the grammar that it asked for, which is ready."""
        asked, number = message.sampling.grammar, spec.grammar_id
        if asked is None and not number:
            return
        given = self._grammars.get(number)
        if given != asked:
            raise Violation(f"{message.rid} is to follow {asked}, but starts with grammar {number}, which is {given}")
        if number not in self._ready:
            raise Violation(f"{message.rid} starts before its grammar {number} is ready")

    def note(self, orders: Sequence[GrammarOrder], live: Iterable[Generate]) -> None:
        """Note what the last stage is told. Raises Violation when it is to forget what a request still needs."""
        self._grammars.update({order.id: order.grammar for order in orders if order.grammar is not None})
        for order in orders:
            if order.grammar is not None:
                continue
            gone = self._grammars.pop(order.id, None)
            self._ready.discard(order.id)
            users = [one.rid for one in live if gone is not None and one.sampling.grammar == gone]
            # It may have come again in the meantime, under another id.
            if users and gone not in self._grammars.values():
                raise Violation(f"grammar {order.id} is forgotten while {', '.join(users)} must follow it")
