"""How a frame from a socket, a pipe or a file becomes a value of a declared type, or a BadFrameError and nothing else.

Owns what decoding can raise; knows no message. All frames of other processes are decoded here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import EngineError

__all__ = ["BadFrameError", "decoder_of"]


class BadFrameError(EngineError, msgspec.DecodeError):
    """A frame is no value of the type that was awaited: another shape, bytes that are no text, nested without end."""


def decoder_of(kind: Any) -> Callable[[bytes | bytearray | memoryview], Any]:
    """A function that decodes msgpack to ``kind``. It raises BadFrameError for anything else.

    The library's own error is not enough: it lets text that is not UTF-8 and nesting that is too deep through as they
    are.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_frame(data: bytes | bytearray | memoryview) -> Any:
        try:
            return decode(data)
        except Exception as exc:  # besides the library's own errors, whatever the checks of a type raise
            raise BadFrameError(f"{type(exc).__name__}: {exc}") from exc

    return decode_frame
