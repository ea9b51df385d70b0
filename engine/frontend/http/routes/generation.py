"""The generation routes: the native one and those of the OpenAI and Anthropic protocols.

A body becomes an order, the order a session, the session a reply, whole or as a stream of server-sent events. Owns
disconnects and the writing of streams; the session owns the reply's content, the protocols its shape.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.frontend.http.body_reader import BodyReader, unless_gone, until_gone
from engine.frontend.http.description import Description
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.forked_work import BodyWork, LongBodies, is_long
from engine.frontend.http.grammar_check import GrammarCheck
from engine.frontend.http.metrics import Metrics
from engine.frontend.http.request_log import current_record
from engine.frontend.http.responses import JSON_TYPE
from engine.frontend.protocols.anthropic import (
    MESSAGE_EVENTS,
    MessageAnswer,
    MessagesBody,
    MessagesError,
    MessageShape,
    message_order,
)
from engine.frontend.protocols.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.protocols.openai.chat_blocks import NewChoice, SpokenChoice
from engine.frontend.protocols.openai.embeddings import EmbeddingAnswer, EmbeddingBody, EmbeddingShape, embedding_order
from engine.frontend.protocols.openai.requests import chat_order, completion_order
from engine.frontend.protocols.openai.response_bodies import ResponseBody
from engine.frontend.protocols.openai.response_shapes import (
    RESPONSE_EVENTS,
    ResponseAnswer,
    ResponseShape,
    response_order,
)
from engine.frontend.protocols.openai.shapes import ChatShape, CompletionShape
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateAnswer, GenerateBody
from engine.frontend.sessions.prefill_bodies import (
    PREFILL,
    PrefillAnswer,
    PrefillBody,
    PrefillShape,
    prefill_order,
    require_text,
)
from engine.frontend.sessions.requests import Order, ServedModel, native_order, packed, unpacked
from engine.frontend.sessions.sessions import NativeShape, Session, Shape
from engine.frontend.text.answer import Decoder, MarkerDecoder, WholeDecoder
from engine.frontend.text.dialect import Parsing

OPENAI = "openai"
ERRORS = (404, 409, 421, 429, 500, 504)
_GENERATES: Final = (
    "embeddings need an embedding model, and {0!r} generates text: its folder has no modules.json with a pooling; "
    "serve an embedding model, or use /v1/completions here"
)
_EMBEDS: Final = "{0!r} is an embedding model, which generates no text; use /v1/embeddings here, or serve another model"
# The bytes of a reply to write before other tasks of the event loop get a turn.
BYTES_A_TURN: Final = 1 << 20
# The turns of the event loop from a readable socket to a written event: the socket, the reply, the stream. A large
# reply yields this many turns after each of its own; otherwise a token would wait for three of its parts.
TURNS_OF_A_TOKEN: Final = 3
# The extension in a request's scope that has the connection's PartWriter.
PART_WRITER: Final = "lockstep.part_writer"


class OrderRoute(NamedTuple):
    """A route whose bodies become orders. ``about`` has the arguments of its ``Description``.

    ``shape`` builds the shape of its replies, given a factory of parsers for a chat's choices. ``is_chat``: a template
    renders its bodies.
    """

    name: str
    says: str
    order: Callable[[bytes, ServedModel], Order]
    shape: Callable[[Order, ServedModel, NewChoice], Shape]
    about: Mapping[str, Any]
    is_chat: bool = False


EMBEDDINGS: Final = "/v1/embeddings"
ROUTES: Final[Mapping[str, OrderRoute]] = {
    "/generate": OrderRoute(
        "generate",
        "Generate from a text or token ids.",
        native_order,
        lambda order, *_: NativeShape(order.n),
        {
            "body": GenerateBody,
            "answer": GenerateAnswer,
            "may_be_list": True,
            "events": (GenerateAnswer,),
            "errors": (409, 421, 429, 500, 504),
            "tag": "native",
        },
    ),
    "/v1/completions": OrderRoute(
        "completions",
        "Complete one or more prompts.",
        completion_order,
        lambda order, served, _: CompletionShape(order, served),
        {"body": CompletionBody, "answer": CompletionAnswer, "events": (CompletionAnswer,), "tag": OPENAI},
    ),
    "/v1/chat/completions": OrderRoute(
        "chat_completions",
        "Answer a conversation.",
        chat_order,
        ChatShape,
        {"body": ChatBody, "answer": ChatAnswer, "events": (ChatChunk,), "tag": OPENAI},
        is_chat=True,
    ),
    "/v1/responses": OrderRoute(
        "responses",
        "Answer a conversation, as items. Nothing is stored: the client sends the whole conversation.",
        response_order,
        ResponseShape,
        {"body": ResponseBody, "answer": ResponseAnswer, "events": RESPONSE_EVENTS, "tag": OPENAI},
        is_chat=True,
    ),
    "/v1/messages": OrderRoute(
        "messages",
        "Answer a conversation, in the Anthropic protocol.",
        message_order,
        MessageShape,
        {
            "body": MessagesBody,
            "answer": MessageAnswer,
            "events": MESSAGE_EVENTS,
            "failure": MessagesError,
            "tag": "anthropic",
        },
        is_chat=True,
    ),
    EMBEDDINGS: OrderRoute(
        "embeddings",
        "Return the vector of each text. Only for embedding models.",
        embedding_order,
        lambda order, served, _: EmbeddingShape(order, served),
        {"body": EmbeddingBody, "answer": EmbeddingAnswer, "tag": OPENAI},
    ),
    PREFILL: OrderRoute(
        "prefill",
        "Compute a prompt and send its KV to a decode engine; replies when all of it is sent.",
        prefill_order,
        lambda *_: PrefillShape(),
        {"body": PrefillBody, "answer": PrefillAnswer, "errors": (409, 500, 504), "tag": "prefill"},
    ),
}
CLIENT_PATHS: Final = tuple(path for path in ROUTES if path != PREFILL)
# The paths whose replies are text.
GENERATING: Final = tuple(path for path in CLIENT_PATHS if path != EMBEDDINGS)


def orders_of(served: ServedModel) -> Mapping[str, Callable[[bytes], Order]]:
    """Map each route's path to the function that turns its bodies into orders."""
    return {path: functools.partial(_order_of, path, served) for path in ROUTES}


def _order_of(path: str, served: ServedModel, data: bytes) -> Order:
    return ROUTES[path].order(data, served)


def order_works(served: ServedModel) -> dict[str, BodyWork]:
    """Map each route's path to the work that a worker process does on its long bodies."""
    return {path: functools.partial(packed, take=take) for path, take in orders_of(served).items()}


class GenerationRoutes:
    """Reads orders and replies to them. ``long_bodies`` must know ``order_works``."""

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

    def add_to(self, router: APIRouter, description: Description, paths: Iterable[str] = CLIENT_PATHS) -> None:
        for path in paths:
            route = ROUTES[path]
            about = description.route(**{"errors": ERRORS, **route.about})
            router.post(path, name=route.name, description=route.says, **about)(self._answer_to(path))

    def _answer_to(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await self._respond(path, request, await self._take_order(path, request))

        return answer

    async def _take_order(self, path: str, request: Request) -> Order:
        """Read and check a request's order. A worker process reads a long body, so that no stream waits. Raises
        ApiError.
        """
        limits, name = self._served.limits, self._served.model_name
        if path != PREFILL:
            require_text(limits)
        if bool(limits.embedding_size) != (path == EMBEDDINGS):
            words = _EMBEDS if limits.embedding_size else _GENERATES
            raise ApiError.invalid(words.format(name), param="model")
        async with self._bodies.body_of(request) as data:
            if is_long(data, is_chat=ROUTES[path].is_chat):
                order = await unpacked(await unless_gone(request, self._long_bodies.work_on(path, data)))
            else:
                order = ROUTES[path].order(data, self._served)
        if order.messages[0].sampling.grammar is not None:
            await unless_gone(request, self._grammars.look(order))
        return order

    async def _respond(self, path: str, request: Request, order: Order) -> Response:
        """Send an order's requests to the engine and return their reply, which is empty for a client that has left.

        Raises ApiError if a request is refused or fails.
        """
        served, record = self._served, current_record()
        session = Session(
            self._client.sessions,
            order,
            ROUTES[path].shape(order, served, functools.partial(self._spoken_choice, order.parsing)),
            self._decoder_of(order),
            observe=lambda: self._metrics.begin().note,
            request_id=None if record is None else record.request_id,
        )
        watch = asyncio.create_task(_abort_on_disconnect(request, session))
        try:
            while session.send_some():
                await asyncio.sleep(0)
            if order.stream and not session.is_cut_short:
                # A stream's status waits for the first output, so that a refusal can have its own status.
                return EventStream(session, await _first_part(session), watch)
            while not session.collect():
                await _news_of(session)
            body = await _shaped(session)
        except BaseException:
            session.abort()
            watch.cancel()
            raise
        watch.cancel()
        return _sent_in_parts(body)

    def _decoder_of(self, order: Order) -> Decoder:
        """Choose the decoder of an order's texts, which keeps the markers that the parsers need."""
        tokenizer, parsing = self._served.tokenizer, order.parsing
        if order.shows_special:
            return WholeDecoder(tokenizer)
        if parsing is None:
            return tokenizer
        return MarkerDecoder(tokenizer, self._served.special_ids, self._served.dialect.markers(parsing))

    def _spoken_choice(self, parsing: Parsing | None) -> SpokenChoice:
        if parsing is None:
            return SpokenChoice()
        dialect = self._served.dialect
        start, tokenizer = parsing.reasoning, self._served.tokenizer
        end_of_reasoning = None if start is None else tokenizer.token_to_id(dialect.end_of_reasoning(start))
        return SpokenChoice(
            dialect.parser(parsing),
            dialect.new_call_id,
            self._metrics.count_call,
            named=parsing.named,
            end_of_reasoning=end_of_reasoning,
        )


async def _abort_on_disconnect(request: Request, session: Session) -> None:
    await until_gone(request)
    session.leave()


async def _shaped(session: Session) -> bytes:
    """Build the body of a collected reply; other tasks run while a large one is built."""
    shaping = session.body()
    while True:
        try:
            next(shaping)
        except StopIteration as done:
            body: bytes = done.value
            return body
        for _ in range(TURNS_OF_A_TOKEN):
            await asyncio.sleep(0)


def _sent_in_parts(body: bytes) -> Response:
    """Build a JSON response; other tasks run while a large one is sent."""
    if len(body) <= BYTES_A_TURN:
        return Response(body, media_type=JSON_TYPE)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), BYTES_A_TURN):
            yield body[start : start + BYTES_A_TURN]

    return StreamingResponse(parts(), headers={"content-length": str(len(body))}, media_type=JSON_TYPE)


async def _first_part(session: Session) -> bytes:
    """Wait for the first part of a stream. Raises ApiError."""
    while not (part := session.part()) and not session.has_begun:
        await _news_of(session)
    return part


async def _news_of(session: Session) -> None:
    """Wait until there is something to take; if there already is, wait for one turn of the event loop."""
    if session.has_more:
        await asyncio.sleep(0)
        return
    came = asyncio.Event()
    session.on_output = came.set
    await came.wait()


class PartWriter(Protocol):
    """Writes parts of a body that has begun, without a coroutine."""

    @property
    def has_room(self) -> bool:
        """True while the client reads; otherwise parts would pile up."""

    def write_part(self, data: bytes) -> None:
        """Write the next part; it is lost if the client is gone."""


class EventStream(StreamingResponse):
    """A stream that a client's disconnect does not cancel. ``first`` is its first part.

    On a disconnect ``watch`` aborts the request, and the stream ends with it; a cancelled stream would drop the request
    before the scheduler does. While the connection has room, a callback writes all outputs of a turn at once; the
    stream's task wakes only to wait for room and to end.
    """

    media_type = "text/event-stream"

    def __init__(self, session: Session, first: bytes, watch: asyncio.Task[None]) -> None:
        super().__init__(self._parts(first))
        self._session = session
        self._watch = watch
        self._writer: PartWriter | None = None
        self._waiting: asyncio.Future[bytes] | None = None
        # True while ``_go_on`` is scheduled for the next turn of the event loop.
        self._is_due = False
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events. Not an error if the client is gone."""
        self._writer = scope.get("extensions", {}).get(PART_WRITER)
        await self.stream_response(send)

    async def _parts(self, first: bytes) -> AsyncIterator[bytes]:
        """Yield the parts that the task sends: the first, those without room, and the last."""
        try:
            yield first
            while not self._session.is_told:
                yield await self._next_part()
        finally:
            self._watch.cancel()

    async def _next_part(self) -> bytes:
        """Wait for a part that the callback could not write."""
        self._waiting = self._loop.create_future()
        self._session.on_output = self._ask_for_turn
        if self._session.has_more:
            self._ask_for_turn()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _ask_for_turn(self) -> None:
        """Schedule ``_go_on`` for the next turn of the loop: outputs that arrive before it share its write."""
        if not self._is_due and self._waiting is not None:
            self._is_due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting is None or self._waiting.done():
            return
        try:
            part = self._session.part()
        except Exception as exc:  # noqa: BLE001 - ends the stream's task, as if it were raised there
            self._waiting.set_exception(exc)
            return
        if self._session.is_told or (part and (self._writer is None or not self._writer.has_room)):
            self._waiting.set_result(part)
            return
        if part and self._writer is not None:
            self._writer.write_part(part)
        if self._session.has_more:
            self._ask_for_turn()
