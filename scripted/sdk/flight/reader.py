"""Reads a flight frame by frame, with bounds, up to the first line that is truncated or wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight.frames import (
    FORMAT,
    Aborted,
    AnyFrame,
    Arrived,
    Drafted,
    End,
    Event,
    FlightHeader,
    Kept,
    Offered,
    Planned,
    Ready,
    Result,
    Start,
)

# The part of the first line that holds the format.
_FORMAT_WITHIN_BYTES: Final = 200
_LONGEST_LINE_BYTES: Final = 1 << 26
_LARGEST_FILE_BYTES: Final = 1 << 31
_MOST_TIMES: Final = 1 << 40
_EMPTY_SPANS: Final = 64

_decode = msgspec.json.Decoder(AnyFrame).decode


class Flight(msgspec.Struct, frozen=True):
    """A flight that was read. ``damage`` says where reading stopped short of the end; empty for a whole file."""

    header: FlightHeader
    start: Start | None
    frames: tuple[Event | Planned, ...]
    end: End | None
    damage: str = ""

    @property
    def plans(self) -> int:
        return sum([frame.times for frame in self.frames if isinstance(frame, Planned)])


def is_flight(path: str | Path) -> bool:
    """Whether a file starts like a flight."""
    with Path(path).open("rb") as file:
        return FORMAT.encode() in file.read(_FORMAT_WITHIN_BYTES)


def read_header(path: str | Path) -> FlightHeader:
    """Read only the first line. Raises ScriptDefinitionError."""
    with Path(path).open("rb") as file:
        return _header(Path(path), file)


def read_flight(path: str | Path) -> Flight:
    """Read a flight up to the first truncated or wrong line. Raises ScriptDefinitionError without a header."""
    path = Path(path)
    if path.stat().st_size > _LARGEST_FILE_BYTES:
        raise ScriptDefinitionError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 20} MiB; record fewer steps")
    start, end, frames, damage = None, None, list[Event | Planned](), ""
    with path.open("rb") as file:
        header, known = _header(path, file), _Known()
        try:
            for frame in _frames(file):
                known.check(frame)
                match frame:
                    case Start():
                        start = frame
                    case End():
                        end = frame
                    case FlightHeader():
                        pass
                    case _:
                        frames.append(frame)
        except (ValueError, RecursionError) as exc:
            damage = f"read up to line {known.line}: {exc}"
    return Flight(header, start, tuple(frames), end, damage)


def _header(path: Path, file: BinaryIO) -> FlightHeader:
    line = file.readline(_LONGEST_LINE_BYTES)
    try:
        header = msgspec.json.decode(line, type=FlightHeader)
    except (ValueError, RecursionError) as exc:
        raise ScriptDefinitionError(
            f"{path} is not a flight: its first line must be the header of {FORMAT!r}: {exc}; give a file that a "
            "recorder wrote"
        ) from exc
    if header.format != FORMAT:
        raise ScriptDefinitionError(
            f"{path} has the format {header.format!r}, this release reads {FORMAT!r}; read it with the release that "
            "wrote it"
        )
    return header


def _frames(file: BinaryIO) -> Iterator[AnyFrame]:
    while line := file.readline(_LONGEST_LINE_BYTES):
        if not line.endswith(b"\n"):
            raise ValueError("the next line is cut off")
        yield _decode(line)


class _Known:
    """The names in earlier frames that later frames may refer to."""

    def __init__(self) -> None:
        self.line = 1
        self._requests: set[int] = set()
        self._shares: dict[int, int] = {}
        # The last empty plans: their results may report transfers.
        self._empty: deque[range] = deque(maxlen=_EMPTY_SPANS)
        self._plan = 0
        self._ended = False

    def check(self, frame: AnyFrame) -> None:
        """Raise ValueError for a frame that cannot follow the previous ones."""
        match frame:
            case _ if self._ended:
                raise ValueError("a frame behind the end")
            case FlightHeader():
                raise ValueError("a second header")
            case Start():
                self._start(frame)
            case Arrived():
                self._arrive(frame)
            case Aborted():
                self._name(*frame.ids)
            case Offered() | Ready() | Kept():
                self._name(frame.id)
            case Drafted():
                self._name(*[request for request, _ in frame.drafts])
            case Planned():
                self._name(*[request for request, _ in frame.shares], *frame.preempted)
                if frame.plan != self._plan + 1 or not 1 <= frame.times <= (1 if frame.shares else _MOST_TIMES):
                    raise ValueError(f"plan {frame.plan}, {frame.times} times, follows plan {self._plan}")
                self._plan += frame.times
                if frame.shares:
                    self._shares[frame.plan] = len(frame.shares)
                else:
                    self._empty.append(range(frame.plan, frame.plan + frame.times))
            case Result():
                self._result(frame)
            case End():
                self._ended = True
            case _:
                pass
        self.line += 1

    def _start(self, frame: Start) -> None:
        if self.line != 1:
            raise ValueError("a beginning in the middle")
        for held in frame.held:
            self._arrive(held.request)
        for flight in frame.in_flight:
            self._name(*[request for request, _ in flight.shares])
            self._shares[flight.plan] = len(flight.shares)
        self._plan = frame.plan - 1

    def _arrive(self, request: Arrived) -> None:
        if request.id in self._requests:
            raise ValueError(f"request {request.id} arrives twice")
        self._requests.add(request.id)

    def _name(self, *requests: int) -> None:
        unknown = [request for request in requests if request not in self._requests]
        if unknown:
            raise ValueError(f"request {unknown[0]} has not arrived")

    def _result(self, frame: Result) -> None:
        self._name(*frame.sent, *frame.received, *frame.failed)
        is_empty = any(frame.plan in plans for plans in self._empty)
        shares = self._shares.pop(frame.plan, 0 if is_empty else None)
        if shares is None:
            raise ValueError(f"the result of plan {frame.plan}, which is not in flight")
        if len(frame.token_ids) not in (0, shares):
            raise ValueError(f"the result of plan {frame.plan} has {len(frame.token_ids)} shares, the plan {shares}")
