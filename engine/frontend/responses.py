"""One HTTP request: the answer sent whole or as a stream of events.

Owns disconnects; knows no protocol: shapes turn pieces into what their clients expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from engine.frontend.choices import Choices
from engine.frontend.context import FrontEnd
from engine.frontend.detokenizer import Decoder
from engine.frontend.errors import ApiError
from engine.frontend.event_stream import EventStream, Shape
from engine.frontend.order import Order
from engine.frontend.request_log import REQUEST_ID_HEADER, current_record

__all__ = ["JSON_TYPE", "RETRY_AFTER_S", "error_answer", "json_answer", "respond"]

# When a client that found the queue full may ask again: by then a request or two have ended.
RETRY_AFTER_S = "1"
JSON_TYPE = "application/json"


async def respond(
    request: Request,
    front: FrontEnd,
    order: Order,
    shape: Shape,
    *,
    decoder: Decoder | None = None,
) -> Response:
    """Send an order's requests to the engine and show their answers. Raises ApiError when one is refused or fails.

    ``decoder`` gives them their texts, by default the tokenizer.
    Raises ClientDisconnect when the client left before all were sent, once those that were sent have ended.
    """
    choices = Choices(front.client, decoder or front.tokenizer, front.metrics, order)
    watch = asyncio.create_task(_abort_on_disconnect(request, choices))
    try:
        if not await choices.send():
            await choices.whole()
            raise ClientDisconnect
        if not order.stream:
            answers = await choices.whole()
            watch.cancel()
            return json_answer(shape.whole(answers))
        # The status of a stream waits for the first output, so that a refusal gets its own.
        return EventStream(choices, shape, await choices.next_pieces(), watch)
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


async def _abort_on_disconnect(request: Request, choices: Choices) -> None:
    """Abort the request as soon as its client goes away. Its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
    choices.abort()
