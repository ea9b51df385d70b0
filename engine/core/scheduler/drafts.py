"""Drafts: guesses of a request's next tokens, several of which one forward verifies.

They come with the results of a draft model, or are looked up here in the request's own prompt and output. The planner
plans them, the last stage verifies them; nothing that a client sees depends on them but how soon it comes.
"""

from __future__ import annotations

from array import array
from typing import Final

from engine.core.limits import Limits
from engine.core.memory import KVMemory
from engine.core.scheduler.request import Request

# Token ids have up to 63 bits in recordings whose text was redacted.
_ID_TYPE: Final = "q"
_ID_BYTES: Final = 8
# Verifying the four wrong guesses of one request costs a batch of 8 a fifth of a decode (benchmarks.speculation). Where
# guesses fail one after the other it takes more of the text to make one, and then a request is left without them for a
# while, each time twice as long.
_DOUBTED_MISSES: Final = 2
_MISSES_LIMIT: Final = 6
_REST_TOKENS: Final = 64
_LONGEST_REST_TOKENS: Final = 1024


class Drafts:
    """Says what is guessed for a request, as far as there is room for it."""

    def __init__(self, limits: Limits, memory: KVMemory) -> None:
        self._limits = limits
        self._memory = memory

    def take(self, request: Request, *, spare_pages: int) -> tuple[int, ...]:
        """The drafts of a request that is about to decode, with pages for them; none if nothing is guessed.

        They take free pages only, all but ``spare_pages``, so that no cached prefix and no other request gives way to
        a guess; and no more than the request may still say after the token that is certain.
        """
        limits, lease = self._limits, request.lease
        assert lease is not None, f"{request} decodes, but owns no memory"
        if len(request.ids) < request.guesses_from:
            return ()
        most = min(limits.draft_tokens, request.limit_tokens - len(request.ids) - 1)
        if most > 0:
            most = min(most, self._memory.free_tokens_of(lease, spare_pages=spare_pages) - request.planned_tokens - 1)
        if most <= 0:
            return ()
        drafts = request.guesses[:most] if limits.has_draft_model else self._look_up(request, most)
        if drafts:
            self._memory.extend(lease, request.planned_tokens + 1 + len(drafts))
        return drafts

    def _look_up(self, request: Request, count: int) -> tuple[int, ...]:
        """What followed the latest earlier occurrence of the last tokens, of as many of them as occurred before.

        Unless guesses hold it takes twice as many tokens: pairs recur in any text, and what followed them does not. A
        copy that runs into the end goes on with what it has copied, so that a repetition is guessed on and on.
        """
        ids, limits = request.ids, self._limits
        text = _text_of(request)
        fewest = limits.ngram_min if request.guesses_hold else min(2 * limits.ngram_min, limits.ngram_max)
        for tokens in range(min(limits.ngram_max, len(ids) - 1), fewest - 1, -1):
            place = _latest(text, tokens)
            if place is not None:
                period = len(ids) - tokens - place
                return tuple([ids[len(ids) - period + number % period] for number in range(count)])
        return ()


def note_verified(request: Request, held: int) -> None:
    """The drafts of a request were verified, before its new tokens are taken: ``held`` of them were right.

    After several times in a row without any it rests: it is given no drafts for some tokens, and then tries once more.
    If that fails as well it rests twice as long.
    """
    request.misses = 0 if held else request.misses + 1
    if held or request.misses >= _DOUBTED_MISSES:
        request.guesses_hold = held > 0
    if request.misses >= _MISSES_LIMIT:
        rest = _REST_TOKENS << request.misses - _MISSES_LIMIT
        request.guesses_from = len(request.ids) + min(rest, _LONGEST_REST_TOKENS)


def _text_of(request: Request) -> bytearray:
    """The bytes of a request's ids so far, kept with the request so that a step adds only what is new."""
    text = request.lookup_text
    if text is None:
        text = request.lookup_text = bytearray()
    known = len(text) // _ID_BYTES
    text += array(_ID_TYPE, request.ids[known:]).tobytes()
    return text


def _latest(text: bytearray, tokens: int) -> int | None:
    """Where the last ``tokens`` ids of the text occurred before, the latest place; it may overlap the end."""
    suffix, end = text[-tokens * _ID_BYTES :], len(text) - 1
    while (place := text.rfind(suffix, 0, end)) >= 0:
        if place % _ID_BYTES == 0:
            return place // _ID_BYTES
        end = place + len(suffix) - 1
    return None
