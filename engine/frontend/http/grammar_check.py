"""The check of grammars: refuses a grammar that no output can follow, before its request is queued.

A check compiles the grammar in a limited process that ends with its client. A bounded number of valid grammars is
remembered.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from engine.core.limits import Limits
from engine.core.messages import Grammar
from engine.frontend.http.forked_work import (
    CHECK_LIMIT_S,
    MEMORY_BYTES,
    BodyWork,
    LongBodies,
    WorkLostError,
    WorkTooLargeError,
)
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import Order
from engine.grammar.source import Fault, fault_of
from engine.process.clock import Clock

# The kind of work of a check.
GRAMMAR: Final = "grammar"
REMEMBERED_GRAMMARS: Final = 256
# Limits the total size of remembered grammars.
REMEMBERED_CHARS: Final = 4_000_000


class _Question(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A grammar, its field in the body, and the parts from which it was made, each with its place."""

    field: str
    grammar: Grammar
    parts: tuple[tuple[str, Grammar], ...]


_question_of = msgspec.msgpack.Decoder(_Question).decode


class GrammarCheck:
    """Checks the grammar of every order. ``observe`` gets the duration of each check, in seconds.

    ``elsewhere`` must know ``grammar_works``.
    """

    def __init__(self, limits: Limits, elsewhere: LongBodies, clock: Clock, observe: Callable[[float], None]) -> None:
        self._limits = limits
        self._elsewhere = elsewhere
        self._clock = clock
        self._observe = observe
        self._right: OrderedDict[Grammar, None] = OrderedDict()
        self._chars = 0

    async def look(self, order: Order) -> None:
        """Raise ApiError (400), with the field and the place in the grammar, if no output can follow it.

        Cancellation ends the check.
        """
        grammar = order.messages[0].sampling.grammar
        if grammar is None:
            return
        field = order.grammar_field or "grammar"
        require_end(self._limits, field)
        if grammar in self._right:
            self._right.move_to_end(grammar)
            return
        begun_s = self._clock.now()
        try:
            asked = _Question(field=field, grammar=grammar, parts=tuple(order.grammar_parts))
            await self._elsewhere.check(GRAMMAR, msgspec.msgpack.encode(asked))
        except WorkTooLargeError as exc:
            raise ApiError.at(
                field,
                f"must be a {grammar.kind.value} that can be compiled within {CHECK_LIMIT_S:g} s and "
                f"{MEMORY_BYTES >> 20} MB, but this one of {len(grammar.text)} characters cannot; make it smaller",
            ) from exc
        except WorkLostError as exc:
            raise ApiError.unavailable(f"{field} must be checked in its own process, but {exc}; try again") from exc
        finally:
            self._observe(self._clock.now() - begun_s)
        self._remember(grammar)

    def _remember(self, grammar: Grammar) -> None:
        if grammar in self._right:
            return  # Two concurrent requests had it.
        self._right[grammar] = None
        self._chars += len(grammar.text)
        while len(self._right) > REMEMBERED_GRAMMARS or self._chars > REMEMBERED_CHARS:
            oldest, _ = self._right.popitem(last=False)
            self._chars -= len(oldest.text)


def grammar_works() -> dict[str, BodyWork]:
    return {GRAMMAR: _check}


def import_grammars() -> None:
    """Import the library, which takes a quarter of a second, once before processes are forked for checks."""
    importlib.import_module("llguidance")


def _check(data: bytes) -> bytes:
    """Raise ApiError for a grammar that no output can follow, or for its first such part."""
    asked = _question_of(data)
    fault = fault_of(asked.grammar)
    if fault is None:
        return b""
    for place, part in asked.parts:
        if (fault_of_part := fault_of(part)) is not None:
            raise refusal_of(part, fault_of_part, place)
    raise refusal_of(asked.grammar, fault, asked.field)


def require_end(limits: Limits, field: str) -> None:
    """Raise ApiError (400) for a model without an end token, whose output could never be complete."""
    if not limits.eos_token_ids:
        raise ApiError.at(
            field, "needs a model with an end token, but the configuration of this one names no eos_token_id"
        )


def refusal_of(grammar: Grammar, fault: Fault, field: str) -> ApiError:
    """Return the error (400) for a grammar that no output can follow: field, place in the grammar, reason."""
    place = f" at {fault.place}" if fault.place else ""
    return ApiError.at(
        field, f"must be a {grammar.kind.value} that an output can follow, but{place}: {fault.message}; correct it"
    )
