"""The answer to one HTTP request as a stream of server-sent events.

Owns how a stream goes on and ends. What has come is written from a callback, in one write, where the connection takes
it; the stream's task is woken only to wait for room and to end.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, Protocol

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.frontend.choices import Choices, IndexedPiece
from engine.frontend.errors import ApiError
from engine.frontend.protocol import GenerateAnswer
from engine.frontend.request_log import current_record

__all__ = ["PART_WRITER", "EventStream", "PartWriter", "Shape"]

# The extension of a request's scope under which a connection offers to write.
PART_WRITER: Final = "lockstep.part_writer"
_DONE: Final = b"data: [DONE]\n\n"


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


class PartWriter(Protocol):
    """Writes parts of a body that has begun, without a coroutine."""

    @property
    def has_room(self) -> bool:
        """False while the client takes nothing, and parts would pile up."""
        ...

    def write_part(self, data: bytes) -> None:
        """Write the next part; what is written to a client that is gone is lost."""
        ...


class EventStream(StreamingResponse):
    """A stream that a client's disconnect does not cancel. ``first`` are the pieces that were taken already.

    The request is aborted then, by ``watch``, and the stream ends with the request; cancelled first, it would forget
    the request before the scheduler does.
    """

    media_type = "text/event-stream"

    def __init__(
        self, choices: Choices, shape: Shape, first: Sequence[IndexedPiece], watch: asyncio.Task[None]
    ) -> None:
        super().__init__(self._parts(first))
        self._choices = choices
        self._shape = shape
        self._watch = watch
        self._is_over = False
        self._writer: PartWriter | None = None
        self._waiting: asyncio.Future[bytes] | None = None
        # A turn of the event loop is asked for, in which the stream goes on.
        self._is_due = False
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; a client that is gone takes none, and that is no error."""
        self._writer = scope.get("extensions", {}).get(PART_WRITER)
        await self.stream_response(send)

    async def _parts(self, first: Sequence[IndexedPiece]) -> AsyncIterator[bytes]:
        """What the task sends: the first part, what there was no room for, the last part."""
        try:
            yield self._part_of(first)
            while not self._is_over:
                yield await self._next_part()
        finally:
            self._watch.cancel()

    async def _next_part(self) -> bytes:
        """Wait for a part that is not written at once."""
        self._waiting = self._loop.create_future()
        self._choices.on_output = self._ask_for_turn
        if self._choices.has_more:
            self._ask_for_turn()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _ask_for_turn(self) -> None:
        """Go on when the loop turns: all that comes until then goes with it."""
        if not self._is_due and self._waiting is not None:
            self._is_due = True
            self._loop.call_soon(self._go_on, context=self._context)

    def _go_on(self) -> None:
        self._is_due = False
        if self._waiting is None or self._waiting.done():
            return
        try:
            part = self._part_of(())
        except Exception as exc:  # noqa: BLE001 - whatever goes wrong ends the stream's task, as it would inside of it
            self._waiting.set_exception(exc)
            return
        if self._is_over or (part and (self._writer is None or not self._writer.has_room)):
            self._waiting.set_result(part)
            return
        if part and self._writer is not None:
            self._writer.write_part(part)
        if self._choices.has_more:
            self._ask_for_turn()

    def _part_of(self, taken: Sequence[IndexedPiece]) -> bytes:
        """The events of pieces that were taken, or of those that are there now, and the end if that is there too.

        Only a stream that ended in order is closed by ``[DONE]``.
        """
        try:
            part = _joined(self._events(taken or self._choices.pieces()))
            if self._choices.is_over:
                self._is_over = True
                part += _joined(self._shape.last_events()) + _DONE
        except ApiError as exc:
            self._is_over = True
            record = current_record()
            part = _joined([exc.body_for(record.request_id if record is not None else None)])
        return part

    def _events(self, pieces: Sequence[IndexedPiece]) -> Iterable[msgspec.Struct]:
        for index, piece in pieces:
            yield from self._shape.events(index, piece)


def _joined(events: Iterable[msgspec.Struct]) -> bytes:
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])
