"""The clients of the sim tier, with their front end: verbs become messages at once, replies what a client receives.

Plays the real front end's own rules for bodies, text and stop strings; no HTTP, no sockets.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.frontend.answer import Answer, is_shown, joined
from engine.frontend.errors import ApiError
from engine.frontend.grammar_check import refusal_of, require_end
from engine.frontend.protocol import (
    MAX_CALL_TIMEOUT_S,
    AbortBody,
    GenerateAnswer,
    GenerateBody,
    LoadLoraBody,
    PauseBody,
    StrictBody,
    UnloadLoraBody,
    UpdateWeightsBody,
    parse_body,
)
from engine.frontend.routes.queries import timeout_of
from engine.frontend.served_model import check_lora_name, request_of
from engine.grammar import fault_of
from engine.limits import Limits
from engine.messages import (
    FAILURES,
    Abort,
    AbortAll,
    CallAnswer,
    ClientMessage,
    FinishReason,
    Generate,
    PauseGeneration,
    PauseMode,
    Refusal,
    Reply,
    TokenOutput,
)
from scripted.adapters.lockstep.actions import (
    AbortEverything,
    AbortRequest,
    AdministrativeCall,
    LoraLoad,
    LoraUnload,
    Pause,
    Update,
)
from scripted.gate.stop_strings import ByteDecoder
from scripted.rig.clients import Call, Chunk, ClientView

__all__ = ["SimClients"]

# What the route of each call that has a body reads.
_BODIES: Final[Mapping[str, type[StrictBody]]] = {
    AbortRequest.route: AbortBody,
    AbortEverything.route: AbortBody,
    Pause.route: PauseBody,
    Update.route: UpdateWeightsBody,
    LoraLoad.route: LoadLoraBody,
    LoraUnload.route: UnloadLoraBody,
}


class _OpenRequest:
    """One request on its way to its client: the front end's own answer, given at once or piece by piece."""

    def __init__(self, message: Generate, view: ClientView, grammar_field: str | None) -> None:
        self.view = view
        self._grammar_field = grammar_field
        self.is_ending = False
        self._answer = Answer(ByteDecoder(), message)
        self._pieces: list[GenerateAnswer] = []

    def take(self, output: TokenOutput) -> bool:
        """Pass an output on; True when a stop string was found in it and the scheduler has to be told."""
        if output.finish_reason in FAILURES:
            failure = ApiError.of_failure(output, self._grammar_field)
            self.view.fail(failure.body.error.message, None if self.view.status else failure.status)
            return False
        if output.finish_reason is FinishReason.TIMEOUT and not output.completion_tokens:
            self.view.fail(output.error or "the time of this request is over", 504)
            return False
        found_before = self._answer.stop_found
        self._pieces.append(self._answer.piece(output))
        if self.view.streams:
            self._receive(self._pieces.pop())
        elif output.finish_reason is not None:
            self._receive(joined(self._pieces))
        return self._answer.stop_found and not found_before and output.finish_reason is None

    def _receive(self, piece: GenerateAnswer) -> None:
        reason = piece.meta_info.finish_reason
        if not is_shown(piece):
            return
        self.view.status = 200
        self.view.receive(
            Chunk(
                text=piece.text,
                token_ids=piece.output_ids,
                finish_reason=reason and reason.value,
                input_logprobs=tuple(value for value, _, _ in piece.meta_info.input_token_logprobs or ()),
            )
        )
        self.view.closed = reason is not None


class SimClients:
    """Clients and front end in one: verbs become messages at once, replies become what a client receives."""

    def __init__(self, limits: Limits, model_name: str) -> None:
        self._limits = limits
        self._model_name = model_name
        self._sent: list[ClientMessage] = []
        # The lives of each rid whose terminal replies are still to come, oldest first.
        self._open: dict[str, deque[_OpenRequest]] = {}
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()

    def generate(self, rid: str, body: dict[str, Any]) -> ClientView:
        """Check the body as ``/generate`` does and send it."""
        view = ClientView(rid, streams=bool(body.get("stream")))
        try:
            checked = parse_body(GenerateBody, msgspec.json.encode(body))
            text = checked.text
            ids = tuple(text.encode()) if text is not None else tuple(checked.input_ids or ())
            message = request_of(checked, ids, self._limits)
            grammar_field = self._check_grammar(checked)
            self._check_unique(rid)
        except ApiError as exc:
            view.fail(exc.body.error.message, exc.status)
            return view
        self._open.setdefault(rid, deque()).append(_OpenRequest(message, view, grammar_field))
        self._send_message(message)
        return view

    def call(self, action: AdministrativeCall) -> Call:
        """Send the message of an administrative call."""
        call = Call(action.path)
        try:
            _check_call(action, self._model_name)
        except ApiError as exc:
            call.answer(exc.status, exc.body.error.message)
            return call
        call_id = f"call-{next(self._numbers)}"
        self._calls[call_id] = call
        self._send_message(action.message(call_id))
        return call

    def disconnect(self, view: ClientView) -> None:
        """Hang up; the front end aborts the request."""
        view.dropped = view.closed = True
        self._send_message(Abort(rid=view.rid))

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Return at once: the clients have replies as soon as they are sent."""

    def forget(self) -> None:
        """Drop what is still open."""
        self._open.clear()
        self._calls.clear()
        self._sent.clear()

    def take_sent(self) -> list[ClientMessage]:
        """What was sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def send(self, replies: Sequence[Reply]) -> None:
        """The scheduler's outbox: hand replies to the clients."""
        for reply in replies:
            if isinstance(reply, TokenOutput):
                self._output(reply)
            elif isinstance(reply, Refusal):
                self._refusal(reply)
            elif isinstance(reply, CallAnswer) and (call := self._calls.pop(reply.call_id, None)) is not None:
                call.answer(200 if reply.ok else 404 if reply.not_found else 400, reply.message)

    def _check_grammar(self, body: GenerateBody) -> str | None:
        """The field that says what the output must be, if one does. Raises ApiError when no output can follow it."""
        if body.sampling_params.grammar is None:
            return None
        name, grammar = body.sampling_params.grammar
        field = f"sampling_params.{name}"
        require_end(self._limits, field)
        fault = fault_of(grammar)
        if fault is not None:
            raise refusal_of(grammar, fault, field)
        return field

    def _check_unique(self, rid: str) -> None:
        if any(not request.is_ending for request in self._open.get(rid, ())):
            raise ApiError.rid_is_live(rid)

    def _send_message(self, message: ClientMessage) -> None:
        """Send it; what it aborts has a rid that is free from now on."""
        if isinstance(message, Abort):
            ended = [*self._open.get(message.rid, ())]
        elif isinstance(message, AbortAll) or (
            isinstance(message, PauseGeneration) and message.mode is PauseMode.ABORT
        ):
            ended = [request for lives in self._open.values() for request in lives]
        else:
            ended = []
        for request in ended:
            request.is_ending = True
        self._sent.append(message)

    def _output(self, output: TokenOutput) -> None:
        lives = self._open.get(output.rid)
        if lives is None:
            return
        request = lives[0]
        if output.finish_reason is not None:
            self._forget_life(output.rid, request)
        if not request.view.dropped and request.take(output):
            self._send_message(Abort(rid=output.rid, finish_reason=FinishReason.STOP))

    def _refusal(self, refusal: Refusal) -> None:
        error = ApiError.of_refusal(refusal)
        lives = self._open.get(refusal.rid)
        if lives is not None:
            # The newest life is refused: an older one was admitted.
            request = lives[-1]
            self._forget_life(refusal.rid, request)
            request.view.fail(error.body.error.message, error.status)

    def _forget_life(self, rid: str, request: _OpenRequest) -> None:
        self._open[rid].remove(request)
        if not self._open[rid]:
            del self._open[rid]


def _check_call(action: AdministrativeCall, model_name: str) -> None:
    """Raise ApiError for a call that its route refuses."""
    if action.body is not None:
        parse_body(_BODIES[action.route], msgspec.json.encode(action.body))
    if isinstance(action, LoraLoad):
        check_lora_name(action.name, model_name)
    timeout = action.path.partition("?timeout=")[2]
    if timeout:
        timeout_of(timeout, MAX_CALL_TIMEOUT_S)
