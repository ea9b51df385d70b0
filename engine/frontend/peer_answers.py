"""Answers of other engines, read whole within a time and a size, whatever there is at the other end.

httpx bounds each read and not the answer: a peer that sends a byte now and then holds its caller for ever, and one that
sends without end takes its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import httpx

MAX_PEER_ANSWER_BYTES: Final = 4 * 2**20


async def whole_answer(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    content: bytes = b"",
    within_s: float | None = None,
) -> httpx.Response:
    """Ask another engine, and read all of its answer within ``within_s`` seconds, if that is given.

    Raises httpx.HTTPError, also for an answer that is late, compressed, or of more than ``MAX_PEER_ANSWER_BYTES``.
    """
    plain = {"accept-encoding": "identity", **headers}
    body = bytearray()
    try:
        async with asyncio.timeout(within_s), client.stream(method, url, headers=plain, content=content) as answer:
            if "content-encoding" in answer.headers:
                raise httpx.RemoteProtocolError("its answer is compressed, which it was not asked for")
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_PEER_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"its answer has more than {MAX_PEER_ANSWER_BYTES} bytes")
    except TimeoutError as exc:
        raise httpx.ReadTimeout(f"its answer was not whole within {within_s:g} s") from exc
    return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request)
