"""The file of a recording: a header, a frame for each step, an end.

Length-prefixed msgpack, so a torn tail costs only its own frame.

Owns the bytes and their types. A step has its inputs, and checksums of its outputs without the token values of replies,
so that a redacted recording has the same checksums.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from engine.core.checkpoint import Checkpoint
from engine.core.errors import EngineError
from engine.core.frames import BadFrameError, decoder_of
from engine.core.instruments import plan_shape
from engine.core.limits import Limits
from engine.core.messages import Event, Refusal, Reply, TokenOutput, encode
from engine.core.scheduler.ports import StepResult
from lockstep.output_files import open_private
from lockstep.whole_file import open_whole

FORMAT: Final = "lockstep-recording-4"
# The format from before the stages read LoRAs beside the computation. Without LoRAs its steps are the same.
_FORMAT_BEFORE: Final = "lockstep-recording-3"
_LENGTH: Final = struct.Struct(">I")
# A frame holds the messages of one step; no recording has a larger one.
_FRAME_LIMIT_BYTES: Final = 1 << 30
_BUFFER_BYTES: Final = 1 << 16


class RecordingError(EngineError, ValueError):
    """Raised for a file that is not a usable recording; the text names file, rule, value and remedy."""


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="header"):
    """A recording's header. ``first_step`` exceeds 1 when older steps were dropped; a checkpoint may replace them."""

    format: str = FORMAT
    limits: Limits
    redacted: bool = False
    first_step: int = 1


class RecordedStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step: its events, its time in seconds, and ``plan`` and ``said``, checksums of its microbatch and replies."""

    step: int
    now: float
    events: tuple[Event, ...]
    plan: int
    said: int


class End(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="end"):
    """The end of a recording: ``error`` is the exception that killed the scheduler, as ``Type: text``, or None."""

    step: int
    plan_digest: str
    digest: str
    error: str | None = None


Frame = Header | Checkpoint | RecordedStep | End


class Recording(msgspec.Struct, frozen=True):
    """The content of a file; it has no ``end`` if its writer was killed.

    ``checkpoint`` is the scheduler's state before the first of ``steps``; None if the scheduler was new or its state is
    unknown.
    """

    header: Header
    steps: tuple[RecordedStep, ...]
    end: End | None
    checkpoint: Checkpoint | None = None


class RecordingFile:
    """Writes a recording. Raises OSError as files do."""

    # The sink's ``wants_checkpoint``: never, because a file begins with the first step.
    wants_checkpoint: Final = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: BinaryIO = open_private(self.path, _BUFFER_BYTES)

    def write(self, frame: bytes) -> None:
        self._file.write(frame)

    def mark(self, frame: Callable[[], bytes]) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - it has every step in any case
        """Flush and close; idempotent."""
        self._file.close()


def frame_bytes(frame: Frame) -> bytes:
    data = encode(frame)
    return _LENGTH.pack(len(data)) + data


def checks_of(result: StepResult) -> tuple[int, int]:
    """Return checksums of a step's microbatch, and of its replies without token values."""
    plan = 0 if result.microbatch is None else zlib.crc32(encode(plan_shape(result.microbatch)))
    said = zlib.crc32(encode([_reply_shape(reply) for reply in result.replies])) if result.replies else 0
    return plan, said


def read_recording(path: str | Path) -> Recording:
    """Read a recording up to its end or a torn frame. Raises RecordingError for other content."""
    frames = _frames(Path(path))
    header = next(frames, None)
    if not isinstance(header, Header) or header.format not in (FORMAT, _FORMAT_BEFORE):
        raise RecordingError(
            f"{path} must begin with the header of a {FORMAT!r} recording, got {header!r:.80}; "
            "give a file of `engine serve --record FILE`"
        )
    if header.format == _FORMAT_BEFORE and header.limits.max_loras:
        raise RecordingError(
            f"{path} is a {_FORMAT_BEFORE!r} recording of an engine with max_loras={header.limits.max_loras}, which "
            f"loaded LoRAs in other steps than a {FORMAT!r} one; replay it with the release that recorded it"
        )
    rest = list(frames)
    steps = tuple(frame for frame in rest if isinstance(frame, RecordedStep))
    end = next((frame for frame in rest if isinstance(frame, End)), None)
    checkpoint = rest[0] if rest and isinstance(rest[0], Checkpoint) else None
    return Recording(header, steps, end, checkpoint)


def write_frames(path: Path, frames: Iterable[bytes]) -> None:
    """Write a recording that appears whole: an earlier dump of this name stays until then, also on a full disk."""
    with open_whole(path) as file:
        file.writelines(frames)


_frame_of: Callable[[bytes], Frame] = decoder_of(Frame)


def _frames(path: Path) -> Iterator[Frame]:
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            data = file.read(length) if length <= _FRAME_LIMIT_BYTES else b""
            if len(data) < length:
                return
            try:
                yield _frame_of(data)
            except BadFrameError as exc:
                raise RecordingError(f"{path} is not a recording, or is damaged ({exc}); record again") from exc


def _reply_shape(reply: Reply) -> tuple[object, ...]:
    if isinstance(reply, TokenOutput):
        reason = reply.finish_reason
        counts = reply.cached_tokens, reply.completion_tokens, *([len(part)] if (part := reply.prompt_logprobs) else ())
        return reply.rid, len(reply.token_ids), reason, reply.error, *counts
    if isinstance(reply, Refusal):
        return reply.rid, reply.kind, reply.message
    return (reply,)
