"""Drafts: guesses of a request's next tokens; one forward pass verifies several of them.

A draft model sends them with its results, or this module looks them up in the request's own prompt and output. The
planner plans them, the last stage verifies them; for a client they change only the speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.core.errors import IntegrityError
from engine.core.messages import Completion
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import Request

# In recordings with redacted text, token ids have up to 63 bits.
_ID_TYPE: Final = "q"
_ID_BYTES: Final = 8
# Verifying four wrong guesses of one request costs a batch of 8 a fifth of a decode (benchmarks.speculation). After
# failures in a row a longer match is required, and then the request rests, each time twice as long.
_DOUBTED_MISSES: Final = 2
_MISSES_LIMIT: Final = 6
_REST_TOKENS: Final = 64
_LONGEST_REST_TOKENS: Final = 1024


@dataclass(slots=True, eq=False)
class Guessing:
    """The guesses of one request, and their success so far.

    ``guesses`` are a draft model's, of the tokens that follow the request's; ``text`` has the request's tokens so far,
    for looking up drafts without a model. ``misses`` counts the verifications in a row in which no guess held. The
    request gets drafts again once it has ``rests_until`` tokens. ``hold`` is true when a guess held in one of the last
    two verifications.
    """

    guesses: tuple[int, ...] = ()
    text: bytearray | None = None
    misses: int = 0
    rests_until: int = 0
    hold: bool = False

    def note(self, tokens: int, held: int) -> None:
        """Note a verification in which ``held`` drafts were right; the request had this many tokens.

        After several in a row without a hit the request rests: it gets no drafts for some tokens, then tries once more.
        If that fails as well it rests twice as long.
        """
        self.misses = 0 if held else self.misses + 1
        if held or self.misses >= _DOUBTED_MISSES:
            self.hold = held > 0
        if self.misses >= _MISSES_LIMIT:
            rest = _REST_TOKENS << self.misses - _MISSES_LIMIT
            self.rests_until = tokens + min(rest, _LONGEST_REST_TOKENS)


class Drafts(Feature):
    """Guesses tokens for requests while there is room for them. Off without speculation."""

    def __init__(self, core: Core) -> None:
        self._limits = core.limits
        self._memory = core.memory
        self._counters = core.counters
        self.is_on = core.limits.draft_tokens > 0
        # Guesses by request, until the request is gone.
        self._of: dict[Request, Guessing] = {}

    def of(self, request: Request) -> Guessing:
        """Return the guesses of a request; starts to track them if they are new."""
        known = self._of.get(request)
        if known is None:
            known = self._of[request] = Guessing()
        return known

    def draft(self, request: Request, *, spare_pages: int) -> tuple[int, ...]:
        """Return the drafts of a request that is about to decode, with pages for them; none if nothing is guessed.

        Drafts take only free pages and leave ``spare_pages``, so that no cached prefix and no other request gives way
        to a guess. There are at most as many as tokens that the request may emit after the certain one.
        """
        limits, lease, known = self._limits, request.lease, self.of(request)
        assert lease is not None, f"{request} decodes, but owns no memory"
        if len(request.ids) < known.rests_until:
            return ()
        most = min(limits.draft_tokens, request.limit_tokens - len(request.ids) - 1)
        if most > 0:
            most = min(most, self._memory.free_tokens_of(lease, spare_pages=spare_pages) - request.planned_tokens - 1)
        if most <= 0:
            return ()
        drafts = known.guesses[:most] if limits.has_draft_model else self._look_up(request.ids, known, most)
        if drafts:
            self._memory.extend(lease, request.planned_tokens + 1 + len(drafts))
        return drafts

    def take_result(self, launched: Launched, completion: Completion) -> None:
        """Store the draft model's next guesses."""
        if not self._limits.has_draft_model:
            return
        guesses = iter(completion.guesses)
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            if segment.emits:
                self.of(request).guesses = next(guesses, ())

    def verify(self, request: Request, drafts: int, held: int) -> None:
        """Count the drafts that held, and free the memory of the others."""
        assert request.lease is not None, f"{request} owned no memory while it was in flight"
        self._counters.drafted_tokens += drafts
        self._counters.accepted_tokens += held
        self.of(request).note(len(request.ids), held)
        # The KV of a wrong guess is useless: the next token is computed in its place.
        request.planned_tokens -= drafts - held
        self._memory.trim(request.lease, request.planned_tokens)

    def retract(self, request: Request) -> None:
        """Drop guesses that follow tokens whose KV is gone."""
        if request in self._of:
            self._of[request].guesses = ()

    def forget(self, request: Request) -> None:
        self._of.pop(request, None)

    def check(self, live: Sequence[Request]) -> None:
        """Check that only live requests have guesses."""
        if self._of and (strange := self._of.keys() - set(live)):
            raise IntegrityError(f"{list(strange)} are gone, but still have guesses")

    def _look_up(self, ids: list[int], known: Guessing, count: int) -> tuple[int, ...]:
        """Return the tokens that followed the latest earlier occurrence of the longest suffix that has occurred before.

        Unless guesses hold, the match must be twice as long: pairs of tokens recur in any text, but their continuations
        do not. A copy that reaches the end continues with the copied tokens, so that a repetition is guessed at any
        length.
        """
        limits = self._limits
        text = _text_of(ids, known)
        fewest = limits.ngram_min if known.hold else min(2 * limits.ngram_min, limits.ngram_max)
        for tokens in range(min(limits.ngram_max, len(ids) - 1), fewest - 1, -1):
            place = _latest(text, tokens)
            if place is not None:
                period = len(ids) - tokens - place
                return tuple([ids[len(ids) - period + number % period] for number in range(count)])
        return ()


def _text_of(ids: list[int], known: Guessing) -> bytearray:
    """Return the bytes of a request's ids so far; they are kept, so that a step appends only the new ones."""
    text = known.text
    if text is None:
        text = known.text = bytearray()
    length = len(text) // _ID_BYTES
    text += array(_ID_TYPE, ids[length:]).tobytes()
    return text


def _latest(text: bytearray, tokens: int) -> int | None:
    """Return the latest earlier position of the last ``tokens`` ids of the text; it may overlap the end."""
    suffix, end = text[-tokens * _ID_BYTES :], len(text) - 1
    while (place := text.rfind(suffix, 0, end)) >= 0:
        if place % _ID_BYTES == 0:
            return place // _ID_BYTES
        end = place + len(suffix) - 1
    return None
