"""The room for bodies in hand: each takes what it has, in however many parts it comes, and gives it back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.http.body_reader import LARGEST_BODIES_IN_HAND, SMALL_BODY_BYTES, BodyReader
from engine.frontend.schema.errors import ApiError

LIMIT_BYTES = 4 * SMALL_BODY_BYTES
ROOM_BYTES = LARGEST_BODIES_IN_HAND * LIMIT_BYTES
# More bodies of the largest size than there is room for.
FILLING = ROOM_BYTES // (LIMIT_BYTES - SMALL_BODY_BYTES) + 1

bodies = st.lists(st.tuples(st.integers(0, LIMIT_BYTES), st.integers(1, 5)), max_size=6)


def request_of(size: int, parts: int) -> Request:
    each = -(-size // parts)
    left = [b"x" * min(each, size - start) for start in range(0, size, max(1, each))] or [b""]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def admitted(reader: BodyReader, sizes: list[tuple[int, int]]) -> int:
    """How many bodies the reader takes, one beside the other."""
    async with AsyncExitStack() as held:
        for count, (size, parts) in enumerate(sizes):
            try:
                assert len(await held.enter_async_context(reader.body_of(request_of(size, parts)))) == size
            except ApiError:
                return count
    return len(sizes)


@pytest.mark.parametrize("length", [str(LIMIT_BYTES + 1), "1" + 30 * "0", "9" * 5000, "000000000000000000999999999"])
def test_a_declared_length_is_refused_before_its_body(length: str) -> None:
    """C07: however many digits it has."""

    async def receive() -> dict[str, object]:
        raise AssertionError("the body was read")

    async def scene() -> None:
        headers = [(b"content-length", length.encode())]
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
        with pytest.raises(ApiError, match=f"at most {LIMIT_BYTES} bytes"):
            async with BodyReader(LIMIT_BYTES).body_of(request):
                pass

    asyncio.run(scene())


@given(bodies, st.integers(1, 5))
def test_room_is_taken_for_what_a_body_has_and_given_back(before: list[tuple[int, int]], parts: int) -> None:
    """A03, whatever was read before, refused bodies among it."""

    async def scene() -> None:
        reader = BodyReader(LIMIT_BYTES)
        await admitted(reader, before)
        with pytest.raises(ApiError, match="at most"):
            async with reader.body_of(request_of(LIMIT_BYTES + 1, parts)):
                pass
        for _ in range(2):
            assert await admitted(reader, [(LIMIT_BYTES, parts)] * FILLING) == FILLING - 1

    asyncio.run(scene())
