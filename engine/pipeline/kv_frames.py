"""What travels on a connection that carries KV, from a stage of a prefill engine to the same one of a decode engine.

First a greeting and its verdict, then pages: each a header of fixed size and the bytes of one page. After the last page
of an order comes its end, which the receiving side confirms.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from engine.core.frames import LENGTH_BYTES, BadFrameError, decoder_of, framed
from engine.core.messages import encode
from engine.model.page_image import PageLayout

# Counted up whenever what travels changes.
KV_PROTOCOL: Final = 2
PAGE: Final = b"PAGE"
END: Final = b"END."
# What follows, the number of the transfer on the receiving side, and the page's place in it.
HEADER: Final = struct.Struct("<4sQQ")
# A greeting is some hundred bytes; with OpenVINO it names every layer.
_MAX_FRAME_BYTES: Final = 1 << 18
MAX_RUN_CHARS: Final = 64
# A verdict goes into the error of a request, and into logs.
MAX_ERROR_CHARS: Final = 2048


class Greeting(msgspec.Struct, frozen=True):
    """The first frame of the sending side: to which run of the other engine it sends pages of which layout."""

    protocol: int
    run: Annotated[str, msgspec.Meta(max_length=MAX_RUN_CHARS)]
    layout: PageLayout


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a greeting, and to the end of an order; ``error`` says why nothing, or not all, was taken."""

    error: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_CHARS)] | None


decode_greeting: Callable[[bytes | bytearray], Greeting] = decoder_of(Greeting)
decode_verdict: Callable[[bytes | bytearray], Verdict] = decoder_of(Verdict)


class ConnectionOver(Exception):
    """The other side has closed the connection between two frames."""


def send_frame(connection: socket.socket, message: Greeting | Verdict) -> None:
    connection.sendall(framed(encode(message)))


def read_frame(connection: socket.socket) -> bytearray:
    """Raises BadFrameError for a length beyond all bounds, see ``fill`` for the rest."""
    size = bytearray(LENGTH_BYTES)
    fill(connection, memoryview(size), is_first=True)
    length = int.from_bytes(size, "little")
    if length > _MAX_FRAME_BYTES:
        raise BadFrameError(f"a greeting or verdict must have at most {_MAX_FRAME_BYTES} bytes, got {length}")
    data = bytearray(length)
    fill(connection, memoryview(data))
    return data


def fill(connection: socket.socket, into: memoryview, *, is_first: bool = False) -> None:
    """Read until ``into`` is full: one call of the system for all of it where the connection blocks.

    Raises OSError when the other side goes away in the middle, ConnectionOver when it does before what ``is_first``.
    """
    left = into
    while left:
        count = connection.recv_into(left, 0, socket.MSG_WAITALL)
        if not count:
            if is_first and len(left) == len(into):
                raise ConnectionOver
            raise ConnectionResetError("it closed the connection in the middle of a frame")
        left = left[count:]


def bound_waits(connection: socket.socket, *, send_s: float, receive_s: float = 0.0) -> None:
    """Let the system end a send or a receive that makes no progress for so long; 0 never.

    A timeout of Python's own would make it wait for room before each part of a page.
    """
    connection.settimeout(None)
    for option, seconds in ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s)):
        whole = int(seconds)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, round((seconds - whole) * 1e6)))
