"""Knows when the front end will find a stop string, so that the gate can wait for the abort that follows from it.

Runs the front end's own pure ``Answer``; without this, the step of the abort would depend on how fast it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import msgspec

from engine.frontend.answer import Answer
from engine.frontend.detokenizer import Decoder
from engine.messages import Reply, TokenOutput
from scripted.rig.handle import RequestHandle

__all__ = ["ByteDecoder", "StopStrings"]

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
        self._answers: WeakKeyDictionary[RequestHandle, Answer] = WeakKeyDictionary()

    def follow(self, replies: Sequence[Reply], live: Mapping[str, RequestHandle]) -> tuple[list[Reply], list[str]]:
        """What clients are shown of these replies, and the rids that the front end is going to stop because of them."""
        shown: list[Reply] = []
        stopped: list[str] = []
        for reply in replies:
            handle = live.get(reply.rid) if isinstance(reply, TokenOutput) else None
            if not isinstance(reply, TokenOutput) or handle is None or not handle.sampling.stop:
                shown.append(reply)
                continue
            answer = self._answer_of(handle)
            found_before = answer.stop_found
            piece = msgspec.structs.replace(reply, token_ids=answer.piece(reply).output_ids, logprobs=())
            if piece.token_ids or piece.finish_reason is not None:
                shown.append(piece)
            newly = answer.stop_found and not found_before and reply.finish_reason is None
            if newly and not handle.client.dropped:
                stopped.append(reply.rid)
        return shown, stopped

    def _answer_of(self, handle: RequestHandle) -> Answer:
        if handle not in self._answers:
            self._answers[handle] = Answer(self._decoder(), handle.message)
        return self._answers[handle]
