"""Decoding of frames from other processes: a value of the declared type, or a BadFrameError and nothing else.

Owns what decoding can raise; knows no message. All that other processes send is decoded here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from engine.core.errors import EngineError

# A frame on a stream begins with its length in this many bytes.
LENGTH_BYTES: Final = 4


class BadFrameError(EngineError, msgspec.DecodeError):
    """A frame is no value of the type that was awaited: another shape, bytes that are no text, nested without end."""


def decoder_of(kind: Any) -> Callable[[bytes | bytearray | memoryview], Any]:
    """A function that decodes msgpack to ``kind``. It raises BadFrameError for anything else."""
    return _checked(msgspec.msgpack.Decoder(kind).decode)


def json_decoder_of(kind: Any) -> Callable[[bytes | bytearray | memoryview], Any]:
    """A function that decodes JSON to ``kind``. It raises BadFrameError for anything else."""
    return _checked(msgspec.json.Decoder(kind).decode)


def _checked(decode: Callable[[bytes | bytearray | memoryview], Any]) -> Callable[[Any], Any]:
    """``decode`` with one error. The library's own is not enough: text that is not UTF-8 and nesting that is too deep
    raise others.
    """

    def decode_frame(data: bytes | bytearray | memoryview) -> Any:
        try:
            return decode(data)
        except Exception as exc:  # besides the library's own errors, whatever the checks of a type raise
            raise BadFrameError(f"{type(exc).__name__}: {exc}") from exc

    return decode_frame


class Frames:
    """Frames cut from the bytes of a stream. ``name`` is what a frame is called, ``most_bytes`` its longest length."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> bytes | None:
        """The next frame that is whole; None when more must come first. Raises BadFrameError for one too long."""
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
    """A frame as it stands on a stream."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
