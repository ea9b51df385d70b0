"""Redacts a flight: substitutes for token ids preserve prefixes, lengths and the equality of block hashes.

A substitute is a keyed hash of all tokens up to its own, so two texts share a prefix exactly as far as the originals
do, and token frequencies are hidden. Each recording draws its own key and never writes it. Tokens that end a request
stay.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from scripted.sdk.flight.frames import (
    AnyFrame,
    Arrived,
    Drafted,
    Drafts,
    FlightHeader,
    Held,
    InFlight,
    Planned,
    Result,
    Start,
)

_KEY_BYTES: Final = 32
_STATE_BYTES: Final = 16
_TOKEN_BYTES: Final = 5
# Above every vocabulary, so that no substitute ends a request.
_FIRST: Final = 1 << 32


class Redactor:
    """Follows the text of every live request of one flight, whose frames must come in order."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(_KEY_BYTES) if key is None else key
        # The hash state after each request's text, and the tokens that end the request.
        self._texts: dict[int, tuple[bytes, frozenset[int]]] = {}
        self._shares: dict[int, Sequence[int]] = {}

    def redact(self, frame: AnyFrame) -> AnyFrame:
        match frame:
            case FlightHeader():
                return msgspec.structs.replace(frame, redacted=True)
            case Arrived():
                return self._arrived(frame)
            case Start():
                held = tuple([self._held(one) for one in frame.held])
                for flight in frame.in_flight:
                    self._note(flight)
                flights = [msgspec.structs.replace(one, drafts=_blank(one.drafts)) for one in frame.in_flight]
                return msgspec.structs.replace(frame, held=held, in_flight=tuple(flights))
            case Planned():
                self._note(frame)
            case Drafted():
                return msgspec.structs.replace(frame, drafts=_blank(frame.drafts))
            case Result():
                ids = self._shares.pop(frame.plan, ())
                said = [self._said(one, tokens) for one, tokens in zip(ids, frame.token_ids, strict=False)]
                return msgspec.structs.replace(frame, token_ids=tuple(said))
            case _:
                pass
        return frame

    def _note(self, plan: Planned | InFlight) -> None:
        self._shares[plan.plan] = [one for one, _ in plan.shares]

    def _held(self, held: Held) -> Held:
        request = self._arrived(held.request)
        return msgspec.structs.replace(held, request=request, said=self._said(request.id, held.said))

    def _arrived(self, request: Arrived) -> Arrived:
        root = hashlib.blake2b(request.salt.encode(), key=self._key, digest_size=_STATE_BYTES)
        state, prompt = self._text(root.digest(), request.prompt_ids, frozenset())
        self._texts[request.id] = state, frozenset(request.stop_token_ids)
        return msgspec.structs.replace(
            request,
            rid=f"r{request.id}",
            prompt_ids=prompt,
            salt=root.hexdigest() if request.salt else "",
            images=tuple([(start, count, self._name(name)) for start, count, name in request.images]),
        )

    def _name(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=_STATE_BYTES).hexdigest()

    def _said(self, request: int, tokens: Iterable[int]) -> tuple[int, ...]:
        if request not in self._texts:
            return tuple([0 for _ in tokens])
        state, ends = self._texts[request]
        state, said = self._text(state, tokens, ends)
        self._texts[request] = state, ends
        return said

    def _text(self, state: bytes, tokens: Iterable[int], kept: frozenset[int]) -> tuple[bytes, tuple[int, ...]]:
        """Continue a text: return the state after these tokens, and their substitutes."""
        substitutes = []
        for token in tokens:
            data = state + token.to_bytes(8, "little", signed=True)
            digest = hashlib.blake2b(data, key=self._key, digest_size=_STATE_BYTES + _TOKEN_BYTES).digest()
            state = digest[:_STATE_BYTES]
            substitutes.append(token if token in kept else _FIRST + int.from_bytes(digest[_STATE_BYTES:], "little"))
        return state, tuple(substitutes)


def _blank(drafts: Drafts) -> Drafts:
    """Blank the guesses, whose values no scheduler reads."""
    return tuple([(request, (0,) * len(tokens)) for request, tokens in drafts])
