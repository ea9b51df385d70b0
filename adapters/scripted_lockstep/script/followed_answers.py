"""Predicts the front end's replies to clients and the requests that it ends by itself, so that the gate can wait.

The front end ends a request whose stop string it found, and the other choices of a reply if one fails. This runs the
front end's own ``Session``; without it, the step of the abort would depend on the front end's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from engine.core.messages import Abort, ClientMessage, FinishReason, Refusal, Reply, TokenOutput
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import Order
from engine.frontend.sessions.sessions import NativeShape, Session, Sessions
from engine.frontend.text.answer import Decoder
from scripted.script.clients import ClientView
from scripted_lockstep.script.handle import RequestHandle

_BYTES = 256


class ByteDecoder:
    """The embedded tokenizer's alphabet without the tokenizer: token ids below 256 are bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; special tokens have none."""
        del skip_special_tokens
        return bytes([token for token in ids if token < _BYTES]).decode("utf-8", "replace")


class FollowedAnswers:
    """Follows requests with stop strings or several choices; ``decoder`` is loaded with the first of them."""

    def __init__(self, decoder: Callable[[], Decoder]) -> None:
        self._decoder = decoder
        self._followed: WeakKeyDictionary[ClientView, _Followed] = WeakKeyDictionary()

    def follow(self, replies: Sequence[Reply], live: Mapping[str, RequestHandle]) -> tuple[list[Reply], list[Abort]]:
        """Return the replies that clients see, and the aborts that the front end sends because of them."""
        shown: list[Reply] = []
        taken: dict[_Followed, list[TokenOutput | Refusal]] = {}
        for reply in replies:
            handle = live.get(reply.rid) if isinstance(reply, TokenOutput | Refusal) else None
            if handle is None or not (handle.sampling.stop or len(handle.together) > 1):
                shown.append(reply)
                continue
            assert isinstance(reply, TokenOutput | Refusal)
            view = handle.client.answer
            if view not in self._followed:
                self._followed[view] = _Followed(handle.together, view, self._decoder())
            taken.setdefault(self._followed[view], []).append(reply)
        aborts: list[Abort] = []
        for followed, outputs in taken.items():
            shown += followed.take(outputs)
            aborts += followed.aborts
        return shown, aborts


class _Followed:
    """The front end's own session of one reply, which sends nothing.

    ``aborts`` are the aborts that the last outputs cause.
    """

    def __init__(self, handles: Sequence[RequestHandle], view: ClientView, decoder: Decoder) -> None:
        self.aborts: list[Abort] = []
        self._view = view
        self._unended = [handle.rid for handle in handles]
        self._sent: list[ClientMessage] = []
        self._sessions = Sessions(self._sent.append)
        messages = tuple(handle.message for handle in handles)
        self._session = Session(
            self._sessions, Order(rid=view.rid, messages=messages, stream=True), NativeShape(), decoder
        )
        while self._session.send_some():
            continue

    def take(self, outputs: Sequence[TokenOutput | Refusal]) -> list[TokenOutput]:
        """Return the client's part of these outputs, which arrive at the front end together."""
        self._sent.clear()
        for output in outputs:
            self._sessions.take(output)
        inputs = {output.rid: output.prompt_logprobs for output in outputs if isinstance(output, TokenOutput)}
        shown: list[TokenOutput] = []
        failed = False
        try:
            while self._session.has_more:
                for _, piece in self._session.pieces():
                    rid, reason = piece.meta_info.id, piece.meta_info.finish_reason
                    values = inputs.pop(rid, ())
                    shown.append(
                        TokenOutput(rid=rid, token_ids=piece.output_ids, finish_reason=reason, prompt_logprobs=values)
                    )
                    self._unended = [one for one in self._unended if one != rid or reason is None]
        except ApiError:
            failed = True
        # The requests of a client that left are already aborted.
        self.aborts = [m for m in self._sent if isinstance(m, Abort) and not self._view.dropped]
        if failed:
            # The reply ends with an error, for one choice that had not ended.
            return [*shown, TokenOutput(rid=self._unended[0], finish_reason=FinishReason.ERROR)]
        # A whole reply shows nothing before it is complete.
        return shown if self._view.streams or self._session.is_over else []
