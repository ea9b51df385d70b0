"""One HTTP request: the answer sent whole or as a stream of events.

Owns disconnects and how a stream ends; knows no protocol: shapes turn pieces into what their clients expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.frontend.choices import Choices, IndexedPiece
from engine.frontend.context import FrontEnd
from engine.frontend.detokenizer import Decoder
from engine.frontend.errors import ApiError
from engine.frontend.protocol import GenerateAnswer
from engine.frontend.request_log import REQUEST_ID_HEADER, current_record
from engine.messages import Generate

__all__ = ["JSON_TYPE", "RETRY_AFTER_S", "EventStream", "Shape", "error_answer", "json_answer", "respond"]

# When a client that found the queue full may ask again: by then a request or two have ended.
RETRY_AFTER_S = "1"
JSON_TYPE = "application/json"


class Shape(Protocol):
    """How a protocol shows answers; one object for each HTTP request."""

    def whole(self, answers: Sequence[GenerateAnswer]) -> msgspec.Struct:
        """The body of an answer in one, from the answers of all choices."""
        ...

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:
        """The events of a stream that show one piece of one choice; there may be none."""
        ...

    def last_events(self) -> Iterable[msgspec.Struct]:
        """The events after the last piece of the last choice."""
        ...


# Many pieces may be ready. The loop notices that a client is gone when it turns, so it turns after this many. Of the
# writes to a connection that is lost, asyncio logs the sixth and every later one.
EVENTS_A_TURN: Final = 4


class EventStream(StreamingResponse):
    """A stream of server-sent events that a client's disconnect does not cancel.

    The request is aborted then, and the stream ends with the request; cancelled first, it would forget the request
    before the scheduler does.
    """

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; a client that is gone takes none, and that is no error."""
        await self.stream_response(send)


async def respond(
    request: Request,
    front: FrontEnd,
    messages: Sequence[Generate],
    shape: Shape,
    *,
    stream: bool,
    decoder: Decoder | None = None,
) -> Response:
    """Send the requests to the engine and show their answers. Raises ApiError when one is refused or fails.

    ``decoder`` gives them their texts, by default the tokenizer.
    Raises ClientDisconnect when the client left before all were sent, once those that were sent have ended.
    """
    choices = Choices(front.client, decoder or front.tokenizer, front.metrics)
    watch = asyncio.create_task(_abort_on_disconnect(request, choices))
    try:
        if not await choices.send(messages):
            await choices.whole()
            raise ClientDisconnect
        if not stream:
            answers = await choices.whole()
            watch.cancel()
            return json_answer(shape.whole(answers))
        pieces = choices.pieces()
        # The status of a stream waits for the first output, so that a refusal gets its own.
        return EventStream(_events(await anext(pieces), pieces, shape, watch))
    except ApiError:
        watch.cancel()
        raise


def error_answer(
    error: ApiError, *, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that is refused or failed, and what its line in the log says.

    ``request_id`` is for what answers outside of the request's record.
    """
    record = current_record()
    if record is not None:
        record.error = error.body.error.message
        request_id = record.request_id
    own = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": RETRY_AFTER_S}}.get(error.status, {})
    own |= {} if request_id is None else {REQUEST_ID_HEADER: request_id}
    return json_answer(error.body_for(request_id), status=error.status, headers={**(headers or {}), **own})


def json_answer(
    data: msgspec.Struct | Sequence[msgspec.Struct], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with a JSON body."""
    return Response(msgspec.json.encode(data), status, headers, JSON_TYPE)


async def _events(
    first: IndexedPiece, rest: AsyncIterator[IndexedPiece], shape: Shape, watch: asyncio.Task[None]
) -> AsyncIterator[bytes]:
    """The event stream of an answer. Only one that ended in order is closed by ``[DONE]``."""
    try:
        if shown := _joined(shape.events(*first)):
            yield shown
        written = 1
        async for index, piece in rest:
            if shown := _joined(shape.events(index, piece)):
                yield shown
                written += 1
                if written % EVENTS_A_TURN == 0:
                    await asyncio.sleep(0)
        yield _joined(shape.last_events()) + b"data: [DONE]\n\n"
    except ApiError as exc:
        record = current_record()
        yield _joined([exc.body_for(record.request_id if record is not None else None)])
    finally:
        watch.cancel()


def _joined(events: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


async def _abort_on_disconnect(request: Request, choices: Choices) -> None:
    """Abort the request as soon as its client goes away. Its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    choices.abort()
