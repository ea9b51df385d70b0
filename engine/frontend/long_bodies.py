"""Bodies that take long to work on: each gets a process of its own, so that it delays no stream.

Owns how long is long, and what such a process is asked and answers. Knows nothing of what the work is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from engine.frontend.errors import ApiError, ErrorDetail, ErrorType
from engine.frontend.forked_work import WorkLostError

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
