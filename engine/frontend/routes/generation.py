"""Routes that generate: the native one and those of the OpenAI and the Anthropic protocol.

A body becomes an order, the order a session, the session an answer, whole or as a stream of server-sent events. Owns
disconnects and how a stream is written; what an answer is belongs to the session, shapes to the protocols.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.frontend.answer import Decoder
from engine.frontend.anthropic.answers import MESSAGE_EVENTS, MessageAnswer, MessagesError
from engine.frontend.anthropic.bodies import MessagesBody
from engine.frontend.anthropic.shapes import MessageShape, message_order
from engine.frontend.body_reader import BodyReader, unless_gone
from engine.frontend.description import Description
from engine.frontend.dialect import Parsing
from engine.frontend.engine_client import EngineClient
from engine.frontend.errors import ApiError
from engine.frontend.grammar_check import GrammarCheck
from engine.frontend.long_bodies import BodyWork, LongBodies, is_long
from engine.frontend.metrics import Metrics
from engine.frontend.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer
from engine.frontend.openai.bodies import ChatBody, CompletionBody
from engine.frontend.openai.embeddings import EmbeddingAnswer, EmbeddingBody, EmbeddingShape, embedding_order
from engine.frontend.openai.requests import chat_order, completion_order
from engine.frontend.openai.response_answers import RESPONSE_EVENTS, ResponseAnswer
from engine.frontend.openai.response_bodies import ResponseBody
from engine.frontend.openai.response_shapes import ResponseShape, response_order
from engine.frontend.openai.shapes import ChatShape, CompletionShape
from engine.frontend.openai.spoken import SpokenChoice
from engine.frontend.protocol import GenerateAnswer, GenerateBody
from engine.frontend.reasoning import END
from engine.frontend.request_log import current_record
from engine.frontend.requests import Order, ServedModel, native_order, packed, unpacked
from engine.frontend.responses import JSON_TYPE
from engine.frontend.sessions import NativeShape, Session, Shape
from engine.frontend.token_texts import MarkerDecoder, WholeDecoder

NATIVE = "native"
COMPLETION = "completion"
CHAT = "chat"
RESPONSE = "response"
MESSAGE = "message"
EMBEDDING = "embedding"
# The kinds whose bodies a chat template reads.
CHATS = frozenset({CHAT, RESPONSE, MESSAGE})
OPENAI = "openai"
ANTHROPIC = "anthropic"
ERRORS = (404, 409, 429, 500, 504)
_GENERATES: Final = (
    "embeddings need a model that was trained for them, and {0!r} is one that generates text: its folder has no "
    "modules.json that names a pooling; serve an embedding model, or use /v1/completions here"
)
_EMBEDS: Final = "{0!r} is a model that embeds and generates no text; use /v1/embeddings here, or serve another model"
# Makes the shape of a chat's answers, with what finds their parts where they have some.
ShapeMaker = Callable[[Order, ServedModel, Callable[[], SpokenChoice] | None], Shape]
# Bytes of an answer that are written before the event loop turns.
BYTES_A_TURN: Final = 1 << 20
# The extension of a request's scope under which a connection offers to write.
PART_WRITER: Final = "lockstep.part_writer"


def order_works(served: ServedModel) -> dict[str, BodyWork]:
    """What becomes of long bodies, by the kind of order."""
    return {kind: functools.partial(packed, take=take) for kind, take in orders_of(served).items()}


def orders_of(served: ServedModel) -> Mapping[str, Callable[[bytes], Order]]:
    """What makes an order of a body, by the kind of order."""
    return {
        NATIVE: functools.partial(native_order, served=served),
        COMPLETION: functools.partial(completion_order, served=served),
        CHAT: functools.partial(chat_order, served=served),
        RESPONSE: functools.partial(response_order, served=served),
        MESSAGE: functools.partial(message_order, served=served),
        EMBEDDING: functools.partial(embedding_order, served=served),
    }


class GenerationRoutes:
    """Takes orders and answers them. ``long_bodies`` must know ``order_works``."""

    def __init__(
        self,
        served: ServedModel,
        client: EngineClient,
        bodies: BodyReader,
        long_bodies: LongBodies,
        grammars: GrammarCheck,
        metrics: Metrics,
    ) -> None:
        self._served = served
        self._client = client
        self._bodies = bodies
        self._long_bodies = long_bodies
        self._grammars = grammars
        self._metrics = metrics
        self._orders = orders_of(served)

    def add_to(self, router: APIRouter, description: Description) -> None:
        native = description.route(
            body=GenerateBody,
            answer=GenerateAnswer,
            may_be_list=True,
            events=(GenerateAnswer,),
            errors=(409, 429, 500, 504),
            tag=NATIVE,
        )
        router.post("/generate", **native)(self.generate)
        completions = description.route(
            body=CompletionBody, answer=CompletionAnswer, events=(CompletionAnswer,), errors=ERRORS, tag=OPENAI
        )
        router.post("/v1/completions", **completions)(self.completions)
        chats = description.route(body=ChatBody, answer=ChatAnswer, events=(ChatChunk,), errors=ERRORS, tag=OPENAI)
        router.post("/v1/chat/completions", **chats)(self.chat_completions)
        responses = description.route(
            body=ResponseBody, answer=ResponseAnswer, events=RESPONSE_EVENTS, errors=ERRORS, tag=OPENAI
        )
        router.post("/v1/responses", **responses)(self.responses)
        messages = description.route(
            body=MessagesBody,
            answer=MessageAnswer,
            events=MESSAGE_EVENTS,
            errors=ERRORS,
            failure=MessagesError,
            tag=ANTHROPIC,
        )
        router.post("/v1/messages", **messages)(self.messages)
        embeddings = description.route(body=EmbeddingBody, answer=EmbeddingAnswer, errors=ERRORS, tag=OPENAI)
        router.post("/v1/embeddings", **embeddings)(self.embeddings)

    async def generate(self, request: Request) -> Response:
        """Generate from a text or token ids."""
        order = await self.take_order(NATIVE, request)
        return await self._respond(request, order, NativeShape(order.n))

    async def completions(self, request: Request) -> Response:
        """Complete one or more prompts."""
        order = await self.take_order(COMPLETION, request)
        return await self._respond(request, order, CompletionShape(order, self._served))

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer_chat(request, await self.take_order(CHAT, request), ChatShape)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, in items. Nothing is stored: the client sends the whole conversation."""
        return await self._answer_chat(request, await self.take_order(RESPONSE, request), ResponseShape)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, in the Anthropic protocol."""
        return await self._answer_chat(request, await self.take_order(MESSAGE, request), MessageShape)

    async def _answer_chat(self, request: Request, order: Order, shape_of: ShapeMaker) -> Response:
        parsing = order.parsing
        if parsing is None:
            return await self._respond(request, order, shape_of(order, self._served, None))
        shape = shape_of(order, self._served, functools.partial(self._spoken_choice, parsing))
        # An answer's text has the markers in it that it is looked through for.
        markers = self._served.dialect.markers(parsing)
        decoder = MarkerDecoder(self._served.tokenizer, self._served.special_ids, markers)
        return await self._respond(request, order, shape, decoder)

    async def embeddings(self, request: Request) -> Response:
        """Give the vector of each text. Only models that were trained for it do: their folders say so."""
        order = await self.take_order(EMBEDDING, request)
        return await self._respond(request, order, EmbeddingShape(order, self._served))

    async def take_order(self, kind: str, request: Request) -> Order:
        """The order of a request, which can be carried out. A long body delays no stream. Raises ApiError."""
        embeds, name = bool(self._served.limits.embedding_size), self._served.model_name
        if embeds != (kind == EMBEDDING):
            raise ApiError.invalid(_EMBEDS.format(name) if embeds else _GENERATES.format(name), param="model")
        async with self._bodies.body_of(request) as data:
            if is_long(data, is_chat=kind in CHATS):
                order = await unpacked(await unless_gone(request, self._long_bodies.work_on(kind, data)))
            else:
                order = self._orders[kind](data)
        if order.messages[0].sampling.grammar is not None:
            await unless_gone(request, self._grammars.look(order))
        return order

    async def _respond(self, request: Request, order: Order, shape: Shape, decoder: Decoder | None = None) -> Response:
        """Send an order's requests to the engine and show their answers. Raises ApiError when one is refused or fails.

        ``decoder`` gives them their texts, by default the tokenizer. Raises ClientDisconnect when the client left
        before all were sent, once those that were sent have ended.
        """
        if order.shows_special:
            decoder = WholeDecoder(self._served.tokenizer)
        record = current_record()
        session = Session(
            self._client.sessions,
            order,
            shape,
            decoder or self._served.tokenizer,
            observe=lambda: self._metrics.begin().note,
            request_id=None if record is None else record.request_id,
        )
        watch = asyncio.create_task(_abort_on_disconnect(request, session))
        try:
            while session.send_some():
                await asyncio.sleep(0)
            if order.stream and not session.is_cut_short:
                # The status of a stream waits for the first output, so that a refusal gets its own.
                return EventStream(session, await _first_part(session), watch)
            await _collected(session)
        except BaseException:
            session.abort()
            watch.cancel()
            raise
        watch.cancel()
        if session.is_cut_short:
            raise ClientDisconnect
        return _sent_in_parts(await _shaped(session))

    def _spoken_choice(self, parsing: Parsing) -> SpokenChoice:
        dialect = self._served.dialect
        end_of_reasoning = None if parsing.reasoning is None else self._served.tokenizer.token_to_id(END)
        return SpokenChoice(
            dialect.parser(parsing),
            dialect.new_call_id,
            self._metrics.count_call,
            named=parsing.named,
            end_of_reasoning=end_of_reasoning,
        )


async def _abort_on_disconnect(request: Request, session: Session) -> None:
    """Abort the request as soon as its client goes away. Its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    session.abort()


async def _collected(session: Session) -> None:
    """Wait for the whole answer. Raises ApiError."""
    while not session.collect():
        await _news_of(session)


async def _shaped(session: Session) -> bytes:
    """The body of an answer that was collected; the event loop turns while a large one is made."""
    shaping = session.body()
    while True:
        try:
            next(shaping)
        except StopIteration as done:
            body: bytes = done.value
            return body
        await asyncio.sleep(0)


def _sent_in_parts(body: bytes) -> Response:
    """An answer of JSON; the event loop turns while a large one is sent."""
    if len(body) <= BYTES_A_TURN:
        return Response(body, media_type=JSON_TYPE)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), BYTES_A_TURN):
            yield body[start : start + BYTES_A_TURN]

    return StreamingResponse(parts(), headers={"content-length": str(len(body))}, media_type=JSON_TYPE)


async def _first_part(session: Session) -> bytes:
    """Wait for the part that begins a stream. Raises ApiError."""
    while not (part := session.part()) and not session.has_begun:
        await _news_of(session)
    return part


async def _news_of(session: Session) -> None:
    if session.has_more:
        return
    came = asyncio.Event()
    session.on_output = came.set
    await came.wait()


class PartWriter(Protocol):
    """Writes parts of a body that has begun, without a coroutine."""

    @property
    def has_room(self) -> bool:
        """False while the client takes nothing, and parts would pile up."""

    def write_part(self, data: bytes) -> None:
        """Write the next part; what is written to a client that is gone is lost."""


class EventStream(StreamingResponse):
    """A stream that a client's disconnect does not cancel. ``first`` is the part that was taken already.

    ``watch`` aborts the request then, and the stream ends with it; cancelled first, it would forget the request before
    the scheduler does. What has come is written from a callback, in one write, where the connection takes it; the
    stream's task is woken only to wait for room and to end.
    """

    media_type = "text/event-stream"

    def __init__(self, session: Session, first: bytes, watch: asyncio.Task[None]) -> None:
        super().__init__(self._parts(first))
        self._session = session
        self._watch = watch
        self._writer: PartWriter | None = None
        self._waiting: asyncio.Future[bytes] | None = None
        # A turn of the event loop is asked for, in which the stream goes on.
        self._is_due = False
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; a client that is gone takes none, and that is no error."""
        self._writer = scope.get("extensions", {}).get(PART_WRITER)
        await self.stream_response(send)

    async def _parts(self, first: bytes) -> AsyncIterator[bytes]:
        """What the task sends: the first part, what there was no room for, the last part."""
        try:
            yield first
            while not self._session.is_told:
                yield await self._next_part()
        finally:
            self._watch.cancel()

    async def _next_part(self) -> bytes:
        """Wait for a part that is not written at once."""
        self._waiting = self._loop.create_future()
        self._session.on_output = self._ask_for_turn
        if self._session.has_more:
            self._ask_for_turn()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _ask_for_turn(self) -> None:
        """Go on when the loop turns: all that comes until then goes with it."""
        if not self._is_due and self._waiting is not None:
            self._is_due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting is None or self._waiting.done():
            return
        try:
            part = self._session.part()
        except Exception as exc:  # noqa: BLE001 - whatever goes wrong ends the stream's task, as it would inside of it
            self._waiting.set_exception(exc)
            return
        if self._session.is_told or (part and (self._writer is None or not self._writer.has_room)):
            self._waiting.set_result(part)
            return
        if part and self._writer is not None:
            self._writer.write_part(part)
        if self._session.has_more:
            self._ask_for_turn()
