"""The frames of a KV connection from a stage of a prefill engine to the same stage of a decode engine.

A greeting and its verdict come first, then pages: each a header of fixed size and the bytes of one page. An end follows
the last page of an order, and the receiver confirms it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from engine.core.frames import LENGTH_BYTES, BadFrameError, decoder_of, framed
from engine.core.messages import encode
from engine.model.page_layout import PageLayout

# Incremented with every change of the frames.
KV_PROTOCOL: Final = 3
PAGE: Final = b"PAGE"
END: Final = b"END."
# The kind of frame, the transfer's number on the receiving side, and the page's index in it.
HEADER: Final = struct.Struct("<4sQQ")
# A greeting has a few thousand bytes, most of them the model's fields; with OpenVINO it names every layer.
_MAX_FRAME_BYTES: Final = 1 << 18
MAX_RUN_CHARS: Final = 64
# Bounded, because a verdict becomes part of a request's error and of logs.
MAX_ERROR_CHARS: Final = 2048


class Greeting(msgspec.Struct, frozen=True):
    """The sender's first frame: the run of the receiving engine, and the layout and origin of the pages."""

    protocol: int
    run: Annotated[str, msgspec.Meta(max_length=MAX_RUN_CHARS)]
    layout: PageLayout


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a greeting or to the end of an order; ``error`` says why pages were refused or are missing."""

    error: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_CHARS)] | None


decode_greeting: Callable[[bytes | bytearray], Greeting] = decoder_of(Greeting)
decode_verdict: Callable[[bytes | bytearray], Verdict] = decoder_of(Verdict)


class ConnectionOver(Exception):
    """The other side has closed the connection between two frames."""


def send_frame(connection: socket.socket, message: Greeting | Verdict) -> None:
    connection.sendall(framed(encode(message)))


def read_frame(connection: socket.socket) -> bytearray:
    """Read one frame. Raises BadFrameError for a length beyond the bound, and the errors of ``fill``."""
    size = bytearray(LENGTH_BYTES)
    fill(connection, memoryview(size), is_first=True)
    length = int.from_bytes(size, "little")
    if length > _MAX_FRAME_BYTES:
        raise BadFrameError(f"a greeting or verdict must have at most {_MAX_FRAME_BYTES} bytes, got {length}")
    data = bytearray(length)
    fill(connection, memoryview(data))
    return data


def fill(connection: socket.socket, into: memoryview, *, is_first: bool = False) -> None:
    """Read until ``into`` is full, in one system call if the connection blocks.

    Raises OSError when the peer leaves in the middle, ConnectionOver when it leaves before a frame that ``is_first``.
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
    """Have the system fail a send or receive that makes no progress for these times; 0: never.

    Python's own timeout would poll before each part of a page.
    """
    connection.settimeout(None)
    for option, seconds in ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s)):
        whole = int(seconds)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, round((seconds - whole) * 1e6)))
