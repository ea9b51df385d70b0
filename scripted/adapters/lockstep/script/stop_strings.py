"""Knows when the front end will find a stop string, so that the gate can wait for the abort that follows from it.

Runs the front end's own ``Session``; without this, the step of the abort would depend on how fast it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import msgspec

from engine.frontend.answer import Decoder
from engine.frontend.errors import ApiError
from engine.frontend.protocol import GenerateAnswer
from engine.frontend.requests import Order
from engine.frontend.sessions import NativeShape, Session, Sessions
from engine.messages import Abort, ClientMessage, Generate, Reply, TokenOutput
from scripted.adapters.lockstep.script.handle import RequestHandle

_BYTES = 256


class ByteDecoder:
    """The embedded tokenizer's alphabet without the tokenizer: token ids below 256 are bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; special tokens have none."""
        del skip_special_tokens
        return bytes([token for token in ids if token < _BYTES]).decode("utf-8", "replace")


class StopStrings:
    """Follows the requests that have stop strings; ``decoder`` is asked for when the first one comes."""

    def __init__(self, decoder: Callable[[], Decoder]) -> None:
        self._decoder = decoder
        self._followed: WeakKeyDictionary[RequestHandle, _Followed] = WeakKeyDictionary()

    def follow(self, replies: Sequence[Reply], live: Mapping[str, RequestHandle]) -> tuple[list[Reply], list[str]]:
        """What clients are shown of these replies, and the rids that the front end is going to stop because of them."""
        shown: list[Reply] = []
        stopped: list[str] = []
        for reply in replies:
            handle = live.get(reply.rid) if isinstance(reply, TokenOutput) else None
            if not isinstance(reply, TokenOutput) or handle is None or not handle.sampling.stop:
                shown.append(reply)
                continue
            if handle not in self._followed:
                self._followed[handle] = _Followed(handle.message, self._decoder())
            pieces, stops = self._followed[handle].take(reply)
            shown += [msgspec.structs.replace(reply, token_ids=piece.output_ids, logprobs=()) for piece in pieces]
            if stops and not handle.client.dropped:
                stopped.append(reply.rid)
        return shown, stopped


class _Followed:
    """The front end's own session of one request, which sends nothing to anybody."""

    def __init__(self, message: Generate, decoder: Decoder) -> None:
        self._sent: list[ClientMessage] = []
        self._sessions = Sessions(self._sent.append)
        order = Order(rid=message.rid, messages=(message,), stream=True)
        self._session = Session(self._sessions, order, NativeShape(), decoder)
        self._session.send_some()

    def take(self, output: TokenOutput) -> tuple[list[GenerateAnswer], bool]:
        """What a client is shown of an output, and whether the front end ends its request because of it."""
        self._sent.clear()
        self._sessions.take(output)
        try:
            pieces = [piece for _, piece in self._session.pieces()]
        except ApiError:
            pieces = []
        return pieces, any(isinstance(message, Abort) for message in self._sent)
