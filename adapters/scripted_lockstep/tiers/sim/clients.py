"""The clients of the sim tier: verbs become messages at once, and replies become what a client receives.

A shell around the front end's own state machine, like the HTTP front end: the same rules for bodies, and the same bytes
for clients. No HTTP, no sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.core.errors import ProcessDiedError
from engine.core.limits import Limits
from engine.core.messages import CacheEvent, CallAnswer, ClientMessage, Refusal, Reply, TokenOutput
from engine.core.scheduler import Scheduler
from engine.frontend.http.grammar_check import refusal_of, require_end
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import MAX_CALL_TIMEOUT_S, parse_body, timeout_of
from engine.frontend.schema.operator_routes import OPERATOR_ROUTES
from engine.frontend.sessions.prefill_bodies import require_text
from engine.frontend.sessions.requests import Order, ServedModel, check_lora_name, native_order
from engine.frontend.sessions.sessions import NativeShape, Session, Sessions, finished
from engine.frontend.text.tokenizer import ChatTemplate
from engine.grammar.source import fault_of
from scripted.script.clients import Call, ClientView, receive_event, receive_events
from scripted_lockstep.actions import EngineCall, LoraLoad
from scripted_lockstep.actions.bodies import view_of
from scripted_lockstep.actions.client_requests import PREFILL_ENGINE, of_role
from scripted_lockstep.script.followed_answers import ByteDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class _ByteTokenizer(ByteDecoder):
    """The embedded tokenizer: a token for each byte, and special ones."""

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        del add_special_tokens
        return [SimpleNamespace(ids=list(text.encode())) for text in texts]

    def get_vocab(self) -> dict[str, int]:
        return {"<|reserved_0|>": 261}

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}


class SimClients:
    """Clients and front end in one: verbs become messages at once, replies become what a client receives."""

    def __init__(self, limits: Limits, model_name: str) -> None:
        template = ChatTemplate(cast(Any, SimpleNamespace(chat_template=None)))
        self._served = ServedModel(cast("Tokenizer", _ByteTokenizer()), template, limits, model_name)
        self._sent: list[ClientMessage] = []
        self._sessions = Sessions(self._sent.append)
        self._open: dict[int, Session] = {}
        # Clients with unread output.
        self._heard: dict[int, tuple[Session, ClientView]] = {}
        self._calls: dict[str, Call] = {}
        # The reason to refuse everything, once a stage has died.
        self._refusal: ApiError | None = None
        self._numbers = itertools.count()
        self._deliveries = itertools.count(1)
        # The scheduler, on which the messages of an engine with a role depend; None without a role.
        self.scheduler: Scheduler | None = None
        # The prefill engine of the next request of a decode engine; None for none.
        self.choose_prefill: Callable[[], str | None] = lambda: PREFILL_ENGINE

    def generate(self, rid: str, body: dict[str, Any], first_page: int | None = None) -> ClientView:
        """Check the body as ``/generate`` does and send it."""
        view = view_of(rid, body)
        try:
            self._require_life()
            if first_page is None:
                require_text(self._served.limits)
            order = native_order(msgspec.json.encode(body), self._served)
            self._check_grammar(order)
            if (scheduler := self.scheduler) is not None:
                at = self.choose_prefill()
                messages = [of_role(one, scheduler, first_page, next(self._deliveries), at) for one in order.messages]
                order = msgspec.structs.replace(order, messages=tuple(messages))
            session = Session(self._sessions, order, NativeShape(order.n), self._served.tokenizer)
            session.on_output = lambda: self._heard.update({id(view): (session, view)})
            while session.send_some():
                continue
        except ApiError as exc:
            view.fail(exc.body.error.message, exc.status)
        else:
            self._open[id(view)] = session
        return view

    def call(self, action: EngineCall) -> Call:
        call = Call(action.path)
        try:
            self._require_life()
            _check_call(action, self._served.model_name)
        except ApiError as exc:
            call.answer(exc.status, exc.body.error.message)
            return call
        call_id = f"call-{next(self._numbers)}"
        self._calls[call_id] = call
        self._sessions.send(action.message(call_id))
        return call

    def disconnect(self, view: ClientView) -> None:
        view.dropped = view.closed = True
        self._open[id(view)].leave()

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Return at once: clients get replies as soon as they are sent."""

    def refuse(self, death: ProcessDiedError) -> None:
        """Refuse everything from now on, like a server that shuts down."""
        self._refusal = ApiError.going_down(death)

    def forget(self) -> None:
        self._refusal = None
        self._sent.clear()
        self._sessions = Sessions(self._sent.append)
        self._open.clear()
        self._calls.clear()

    def take_sent(self) -> list[ClientMessage]:
        sent = list(self._sent)
        self._sent.clear()
        return sent

    def send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, TokenOutput | Refusal):
                self._sessions.take(reply)
            elif isinstance(reply, CallAnswer) and (call := self._calls.pop(reply.call_id, None)) is not None:
                call.answer(200 if reply.ok else 404 if reply.not_found else 400, reply.message)
        heard, self._heard = self._heard, {}
        for session, view in heard.values():
            self._show(session, view)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Do nothing: no router listens in this tier; the oracle sees cache events in the step's result."""

    def _show(self, session: Session, view: ClientView) -> None:
        """Show a client its new output, as the HTTP front end does."""
        try:
            while session.has_more and not session.is_told:
                if view.streams:
                    part = session.part()
                    if session.has_begun and not view.dropped:
                        view.status = 200
                        receive_events(view, part)
                        view.closed = session.is_told
                elif session.collect() and not view.dropped:
                    receive_event(view, finished(session.body()))
                    view.status, view.closed = 200, True
        except ApiError as exc:
            if not view.dropped:
                view.fail(exc.body.error.message, exc.status)
        if session.is_over or session.is_told:
            self._open.pop(id(view), None)

    def _require_life(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _check_grammar(self, order: Order) -> None:
        """Raise ApiError for a grammar that no output can follow."""
        grammar, field = order.messages[0].sampling.grammar, order.grammar_field
        if grammar is None or field is None:
            return
        require_end(self._served.limits, field)
        fault = fault_of(grammar)
        if fault is not None:
            raise refusal_of(grammar, fault, field)


def _check_call(action: EngineCall, model_name: str) -> None:
    """Raise ApiError for a call that its route refuses."""
    if (body := OPERATOR_ROUTES[action.route].body) is not None:
        parse_body(body, msgspec.json.encode(action.body))
    if isinstance(action, LoraLoad):
        check_lora_name(action.name, model_name)
    timeout = action.path.partition("?timeout=")[2]
    if timeout:
        timeout_of(timeout, MAX_CALL_TIMEOUT_S)
