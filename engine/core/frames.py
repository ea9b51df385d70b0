"""Decodes a frame from another process to its declared type, or raises BadFrameError and nothing else.

Everything that other processes send is decoded here. Knows no message type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from engine.core.errors import EngineError

# A frame on a stream begins with its length in this many bytes.
LENGTH_BYTES: Final = 4


class BadFrameError(EngineError, msgspec.DecodeError):
    """A frame is not a value of the expected type: wrong shape, invalid text, or too deeply nested."""


def decoder_of(kind: Any) -> Callable[[bytes | bytearray | memoryview], Any]:
    """Return a function that decodes msgpack to ``kind`` and raises BadFrameError for anything else."""
    return _checked(msgspec.msgpack.Decoder(kind).decode)


def json_decoder_of(kind: Any) -> Callable[[bytes | bytearray | memoryview], Any]:
    """Return a function that decodes JSON to ``kind`` and raises BadFrameError for anything else."""
    return _checked(msgspec.json.Decoder(kind).decode)


def _checked(decode: Callable[[bytes | bytearray | memoryview], Any]) -> Callable[[Any], Any]:
    """Make ``decode`` raise only BadFrameError: the library has other errors for invalid UTF-8 and deep nesting."""

    def decode_frame(data: bytes | bytearray | memoryview) -> Any:
        try:
            return decode(data)
        except Exception as exc:  # the library's errors, and whatever a type's own checks raise
            raise BadFrameError(f"{type(exc).__name__}: {exc}") from exc

    return decode_frame


class Frames:
    """Cuts a stream of bytes into frames. Errors call a frame ``name``; ``most_bytes`` is its size limit."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> bytes | None:
        """Return the next complete frame; None until more bytes arrive. Raises BadFrameError for an oversized one."""
        if len(self._bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._bytes[:LENGTH_BYTES], "little")
        if length > self._most_bytes:
            raise BadFrameError(
                f"a {self._name} must have at most {self._most_bytes} bytes, one of {length} was announced"
            )
        end = LENGTH_BYTES + length
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return frame


def framed(data: bytes) -> bytes:
    """Return a frame with its length prefix, as a stream carries it."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
