"""Makes an order of an HTTP request that generates: reads, checks and tokenizes the body without delaying a stream.

A short body is worked on at once, a long one in a process of its own. Decides nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from fastapi import Request

from engine.frontend.body_reader import BodyReader
from engine.frontend.long_bodies import LONG_BODY_BYTES, BodyWork, LongBodies
from engine.frontend.openai.requests import chat_order, completion_order
from engine.frontend.order import Order, packed, unpacked
from engine.frontend.protocol import GenerateBody, parse_body
from engine.frontend.served_model import ServedModel

__all__ = ["CHAT", "COMPLETION", "NATIVE", "OrderTaker", "order_works"]

NATIVE = "native"
COMPLETION = "completion"
CHAT = "chat"

Orders = Mapping[str, Callable[[bytes], Order]]


def order_works(served: ServedModel) -> dict[str, BodyWork]:
    """What becomes of long bodies, by the kind of order."""
    return {kind: functools.partial(packed, take=take) for kind, take in _orders(served).items()}


class OrderTaker:
    """Takes orders. ``long_bodies`` must know ``order_works``."""

    def __init__(self, served: ServedModel, long_bodies: LongBodies) -> None:
        self._orders = _orders(served)
        self._long_bodies = long_bodies

    async def take(self, kind: str, request: Request, bodies: BodyReader) -> Order:
        """The order of a request to the route of a kind. Raises ApiError."""
        async with bodies.body_of(request) as data:
            if len(data) <= LONG_BODY_BYTES:
                return self._orders[kind](data)
            answer = await self._long_bodies.work_on(kind, data)
        return await unpacked(answer)


def _orders(served: ServedModel) -> Orders:
    return {
        NATIVE: functools.partial(_native_order, served=served),
        COMPLETION: functools.partial(completion_order, served=served),
        CHAT: functools.partial(chat_order, served=served),
    }


def _native_order(data: bytes, served: ServedModel) -> Order:
    body = parse_body(GenerateBody, data)
    message = served.request(body)
    grammar = body.sampling_params.grammar
    field = None if grammar is None else f"sampling_params.{grammar[0]}"
    return Order(rid=message.rid, messages=(message,), stream=body.stream, grammar_field=field, lora_field="lora_path")
