"""Refuses grammars that no output can follow, before anything is queued and without delaying a stream.

A check compiles the grammar, in a thread. What was found right is remembered, as long as there is room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from engine.clock import Clock
from engine.frontend.errors import ApiError
from engine.frontend.requests import Order
from engine.grammar import Fault, fault_of
from engine.limits import Limits
from engine.messages import Grammar

__all__ = ["GrammarCheck", "refusal_of", "require_end"]

REMEMBERED_GRAMMARS: Final = 256
# Of all together, so that long ones cannot fill the memory.
REMEMBERED_CHARS: Final = 4_000_000


class GrammarCheck:
    """Looks at the grammar of every order. ``observe`` is told how many seconds each compilation took."""

    def __init__(self, limits: Limits, clock: Clock, observe: Callable[[float], None]) -> None:
        self._limits = limits
        self._clock = clock
        self._observe = observe
        self._right: OrderedDict[Grammar, None] = OrderedDict()
        self._chars = 0

    async def look(self, order: Order) -> None:
        """Raise ApiError (400), with the field and the place in the grammar, when no output can follow it."""
        grammar = order.messages[0].sampling.grammar
        if grammar is None:
            return
        field = order.grammar_field or "grammar"
        require_end(self._limits, field)
        if grammar in self._right:
            self._right.move_to_end(grammar)
            return
        begun_s = self._clock.now()
        fault = await asyncio.to_thread(fault_of, grammar)
        self._observe(self._clock.now() - begun_s)
        if fault is not None:
            raise await asyncio.to_thread(_refusal_of_part, order) or refusal_of(grammar, fault, field)
        self._remember(grammar)

    def _remember(self, grammar: Grammar) -> None:
        if grammar in self._right:
            return  # Two requests came with it at the same time.
        self._right[grammar] = None
        self._chars += len(grammar.text)
        while len(self._right) > REMEMBERED_GRAMMARS or self._chars > REMEMBERED_CHARS:
            oldest, _ = self._right.popitem(last=False)
            self._chars -= len(oldest.text)


def _refusal_of_part(order: Order) -> ApiError | None:
    """The answer to the first part of a grammar that no output can follow; None when each of them has one."""
    for place, part in order.grammar_parts:
        fault = fault_of(part)
        if fault is not None:
            return refusal_of(part, fault, place)
    return None


def require_end(limits: Limits, field: str) -> None:
    """Raise ApiError (400) for a model that cannot say that its output is complete."""
    if not limits.eos_token_ids:
        raise ApiError.invalid(
            f"{field} needs a model that knows an end of its output, and this one has none: its configuration names no "
            "eos_token_id",
            param=field,
        )


def refusal_of(grammar: Grammar, fault: Fault, field: str) -> ApiError:
    """The answer (400) to a grammar that no output can follow: the field, the place in the grammar, and why."""
    place = f" at {fault.place}" if fault.place else ""
    return ApiError.invalid(
        f"{field} must be a {grammar.kind.value} that an output can follow, but{place}: {fault.message}; mend it",
        param=field,
    )
