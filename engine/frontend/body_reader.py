"""Bodies of requests, read with bounds: on one body, and on what all bodies take while they are read and worked on.

Owns the count of bytes in hand, and how long is long: bodies that take long to work on get a process of their own each,
so that they delay no stream. Knows nothing of what the work is. The connection bounds how long a body may take.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from email.message import Message
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from engine.frontend.errors import ApiError, ErrorDetail, ErrorType, shortened
from engine.frontend.forked_work import WorkLostError

Result = TypeVar("Result")

# This many bodies of the largest size may be in hand at once, whatever the number of connections.
LARGEST_BODIES_IN_HAND = 16
# What every request may have beyond that: large bodies do not keep small ones out.
SMALL_BODY_BYTES = 32_768
JSON = "application/json"
UTF_8 = "utf-8"


class BodyReader:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = LARGEST_BODIES_IN_HAND * limit_bytes

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, counted as in hand for the length of the block. Raises ApiError: 413, 415, 429."""
        _require_plain(request)
        counted = 0
        try:
            parts: list[bytes] = []
            size = 0
            declared = request.headers.get("content-length", "")
            self._check(int(declared) if declared.isdecimal() and declared.isascii() and len(declared) < 20 else 0)
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._check(size)
                beyond = max(0, size - SMALL_BODY_BYTES)
                self._room_bytes -= beyond - counted
                counted = beyond
                if self._room_bytes < 0:
                    raise ApiError(
                        ErrorType.BUSY,
                        f"at most {LARGEST_BODIES_IN_HAND} bodies of {self._limit_bytes} bytes may be in hand at once, "
                        "and they are; send this one later",
                    )
            body = b"".join(parts)
            del parts
            yield body
        finally:
            self._room_bytes += counted

    def _check(self, size: int) -> None:
        if size > self._limit_bytes:
            raise ApiError(
                ErrorType.TOO_LARGE,
                f"the body must have at most {self._limit_bytes} bytes, got {size} or more; send less or raise "
                "--max-body-bytes",
            )


def _require_plain(request: Request) -> None:
    """Raise ApiError (415) for a body that is compressed, or is not in UTF-8: neither is undone here."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the body must be sent as it is, without a Content-Encoding, got {shortened(encoding, 80)!r}; drop it",
        )
    declared = Message()
    declared["content-type"] = request.headers.get("content-type", JSON)
    charset = declared.get_content_charset(UTF_8)
    if charset not in (UTF_8, "utf8", "us-ascii"):
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the body must be JSON in UTF-8, but its charset is declared as {shortened(charset, 80)!r}; send "
            f"'Content-Type: {JSON}'",
        )


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of work on a request that was read. Cancels it and raises ClientDisconnect when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(until_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def until_gone(request: Request) -> None:
    """Wait until the client of a request leaves. Its body was read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


# The worst body of this length takes 11 ms in the event loop; the goal for any body is 50 ms. To fork a process takes
# as long. An object or a list (a message, a tool, a call: a template renders each) takes as long as this many bytes.
# So does an entry of a chat, in a schema or in arguments, which are written again; 1e15 becomes 1000000000000000.0.
LONG_BODY_BYTES = 32_768
BYTES_OF_AN_OBJECT = 40
BYTES_OF_AN_ENTRY = 4
BYTES_OF_AN_EXPONENT = 16
_EXPONENT = re.compile(rb"\d[eE][+\d]")
# The first byte of an answer.
_DONE = b"+"
_REFUSED = b"-"

_encode = msgspec.msgpack.Encoder().encode
_detail_decoder = msgspec.msgpack.Decoder(ErrorDetail)

BodyWork = Callable[[bytes], bytes]


def is_long(data: bytes, *, is_chat: bool = False) -> bool:
    """Whether a body takes long, as far as can be told before it is read; ``is_chat`` says that a template reads it."""
    cost = len(data) + BYTES_OF_AN_OBJECT * (data.count(b"{") + data.count(b"["))
    if is_chat and cost <= LONG_BODY_BYTES:
        cost += BYTES_OF_AN_ENTRY * data.count(b",") + BYTES_OF_AN_EXPONENT * len(_EXPONENT.findall(data))
    return cost > LONG_BODY_BYTES


def body_work(works: Mapping[str, BodyWork]) -> Callable[[bytes], bytes]:
    """What the process of a long body does, by the kind of work. A work raises ApiError for a body that it refuses."""
    return functools.partial(_answer, works=works)


class Ask(Protocol):
    """``ForkedWork.run``."""

    def __call__(self, question: bytes, /, *, is_check: bool) -> Awaitable[bytes]: ...


class LongBodies:
    """Has bodies worked on elsewhere. ``ask`` is ``body_work``, called in a process of its own."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def work_on(self, kind: str, data: bytes) -> memoryview:
        """What the work of a kind makes of a body. Raises the ApiError that it raised, or 503 when it was lost."""
        try:
            return await self._answer_to(kind, data, is_check=False)
        except WorkLostError as exc:
            raise ApiError(
                ErrorType.UNAVAILABLE,
                f"the body of {len(data)} bytes must be read in a process of its own, but {exc}; try again, or send a "
                "shorter one",
            ) from exc

    async def check(self, kind: str, data: bytes) -> None:
        """Have something checked that may be short or long. Raises the ApiError that the check raised.

        Raises WorkLostError when the check was lost, WorkTooLargeError when it was ended.
        """
        await self._answer_to(kind, data, is_check=True)

    async def _answer_to(self, kind: str, data: bytes, *, is_check: bool) -> memoryview:
        answer = memoryview(await self._ask(f"{kind}\n".encode() + data, is_check=is_check))
        if answer[:1] == _REFUSED:
            raise ApiError.of_detail(_detail_decoder.decode(answer[1:]))
        return answer[1:]


def _answer(question: bytes, works: Mapping[str, BodyWork]) -> bytes:
    """The question is the kind of work, a line end and the body."""
    kind, _, data = question.partition(b"\n")
    try:
        return _DONE + works[kind.decode()](data)
    except ApiError as exc:
        return _REFUSED + _encode(exc.body.error)
