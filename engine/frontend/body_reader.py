"""Bodies of requests, read with bounds: on one body, and on what all bodies take while they are read and worked on.

Owns the count of bytes in hand. The connection bounds how long a body may take.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from engine.frontend.errors import ApiError, ErrorType

__all__ = ["BodyReader"]

# This many bodies of the largest size may be in hand at once, whatever the number of connections.
LARGEST_BODIES_IN_HAND = 16
# What every request may have beyond that: large bodies do not keep small ones out.
SMALL_BODY_BYTES = 32_768


class BodyReader:
    """Reads bodies of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._room_bytes = LARGEST_BODIES_IN_HAND * limit_bytes

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, counted as in hand for the length of the block. Raises ApiError: 413, 429."""
        counted = 0
        try:
            parts: list[bytes] = []
            size = 0
            self._check(_declared_bytes(request))
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._check(size)
                beyond = max(0, size - SMALL_BODY_BYTES)
                self._room_bytes -= beyond - counted
                counted = beyond
                if self._room_bytes < 0:
                    raise ApiError(
                        429,
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
                413,
                ErrorType.TOO_LARGE,
                f"the body must have at most {self._limit_bytes} bytes, got {size} or more; send less or raise "
                "--max-body-bytes",
            )


def _declared_bytes(request: Request) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and declared.isascii() and len(declared) < 20 else 0
