"""Reads request bodies within bounds: on each body, and on all bodies that are being read or processed.

Owns the count of bytes in hand. The connection limits the time of a body.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from email.message import Message
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from engine.frontend.schema.errors import ApiError, ErrorType, shortened

Result = TypeVar("Result")

# The bodies of maximum size that may be in hand at once, on any number of connections.
LARGEST_BODIES_IN_HAND = 16
# The bytes of each body that do not count, so that large bodies do not keep small ones out.
SMALL_BODY_BYTES = 32_768
MOST_LENGTH_DIGITS = 19
JSON = "application/json"
UTF_8 = "utf-8"


class BodyReader:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = LARGEST_BODIES_IN_HAND * limit_bytes

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request, counted as in hand until the block ends. Raises ApiError: 413, 415, 429."""
        _require_plain(request)
        counted = 0
        try:
            # Joining the parts of a large body at the end would block the event loop for 0.6 ms per megabyte.
            body, size = io.BytesIO(), 0
            declared = request.headers.get("content-length", "")
            if declared.isdecimal() and declared.isascii():
                # Its first digits alone are more bytes than any limit; Python refuses to read thousands of them.
                self._check(int(declared.lstrip("0")[:MOST_LENGTH_DIGITS] or "0"))
            async for part in request.stream():
                size += len(part)
                self._check(size)
                body.write(part)
                beyond = max(0, size - SMALL_BODY_BYTES)
                self._room_bytes -= beyond - counted
                counted = beyond
                if self._room_bytes < 0:
                    raise ApiError(
                        ErrorType.BUSY,
                        f"at most {LARGEST_BODIES_IN_HAND} bodies of {self._limit_bytes} bytes may be processed at "
                        "once, and the server is at this limit; try again later",
                    )
            whole = body.getvalue()  # the buffer itself, not a copy
            body.close()
            yield whole
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
    """Raise ApiError (415) for a body that is compressed or not in UTF-8."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the body must be sent without a Content-Encoding, got {shortened(encoding, 80)!r}; drop it",
        )
    media_type = request.headers.get("content-type", JSON)
    if not media_type.isascii():
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the Content-Type must be in ASCII, got {shortened(media_type, 80)!r}; send 'Content-Type: {JSON}'",
        )
    declared = Message()
    declared["content-type"] = media_type
    charset = declared.get_content_charset(UTF_8)
    if charset not in (UTF_8, "utf8", "us-ascii"):
        raise ApiError(
            ErrorType.MEDIA_TYPE,
            f"the body must be JSON in UTF-8, but its charset is declared as {shortened(charset, 80)!r}; send "
            f"'Content-Type: {JSON}'",
        )


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of work on a request. Cancels the work and raises ClientDisconnect if the client leaves."""
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
    """Wait until the client of a request leaves; nothing else can arrive after the body."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
