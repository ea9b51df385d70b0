"""Makes an order of an HTTP request that generates: reads, checks and tokenizes the body without delaying a stream.

A short body is worked on at once, a long one in a process of its own. Decides nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from fastapi import Request

from engine.frontend.admission import Admission
from engine.frontend.body_reader import BodyReader
from engine.frontend.errors import ApiError, ErrorType
from engine.frontend.forked_work import WorkLostError
from engine.frontend.openai.requests import chat_order, completion_order
from engine.frontend.order import Order, Orders, packed, unpacked
from engine.frontend.protocol import GenerateBody, parse_body

__all__ = ["CHAT", "COMPLETION", "LONG_BODY_BYTES", "NATIVE", "OrderTaker", "order_work"]

NATIVE = "native"
COMPLETION = "completion"
CHAT = "chat"
# The worst body of this length takes 10 ms in the event loop; the goal for any body is 50 ms. To fork a process
# takes as long.
LONG_BODY_BYTES = 32_768


def order_work(admission: Admission) -> Callable[[bytes], bytes]:
    """The work of the process that long bodies are given to."""
    return functools.partial(packed, orders=_orders(admission))


class OrderTaker:
    """Takes orders. ``work`` is ``order_work``, called elsewhere."""

    def __init__(self, admission: Admission, work: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.admission = admission
        self._orders = _orders(admission)
        self._work = work

    async def take(self, kind: str, request: Request, bodies: BodyReader) -> Order:
        """The order of a request to the route of a kind. Raises ApiError."""
        async with bodies.body_of(request) as data:
            if len(data) <= LONG_BODY_BYTES:
                return self._orders[kind](data)
            try:
                answer = await self._work(f"{kind}\n".encode() + data)
            except WorkLostError as exc:
                raise ApiError(
                    503,
                    ErrorType.UNAVAILABLE,
                    f"the body of {len(data)} bytes must be read in a process of its own, but {exc}; try again, or "
                    "send a shorter one",
                ) from exc
        return await unpacked(answer)


def _orders(admission: Admission) -> Orders:
    return {
        NATIVE: functools.partial(_native_order, admission=admission),
        COMPLETION: functools.partial(completion_order, admission=admission),
        CHAT: functools.partial(chat_order, admission=admission),
    }


def _native_order(data: bytes, admission: Admission) -> Order:
    body = parse_body(GenerateBody, data)
    message = admission.request(body)
    return Order(rid=message.rid, messages=(message,), stream=body.stream)
