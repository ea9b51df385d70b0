"""Records a flight inside an engine's process: a ring of the last steps, written when something goes wrong.

The engine's loop only appends packed frames; checksums, redaction and files are the work of other threads, or of a
process that is about to die. A failure in the recorder ends the recording, never the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

import msgspec
import psutil

from lockstep.output_files import open_private
from lockstep.whole_file import open_whole
from scripted.sdk.flight.frames import AnyFrame, End, Event, FlightHeader, Planned, line_of
from scripted.sdk.flight.packed import MICROSECONDS, Beginning, packed, unpacked
from scripted.sdk.flight.redaction import Redactor

_log = logging.getLogger(__name__)

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

FOLDER_VARIABLE: Final = "LOCKSTEP_RECORD"
OPTIONS_VARIABLE: Final = "LOCKSTEP_RECORD_OPTIONS"
SIGNAL: Final = signal.SIGUSR2
# Signals that tell an engine to stop.
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
SUFFIX: Final = ".flight"
LIVE_SUFFIX: Final = ".live"
ALL: Final = "all"
# A full ring drops its oldest part; each part starts with the state that a replay needs.
_PARTS: Final = 4
# Flights per process, including the one written at its end.
MOST_FILES: Final = 16
# The second word of a live file, between the process and the time of its start.
HEARS: Final = "hears"
DEAF: Final = "deaf"
_EXIT: Final = "exit"
_ENDS: Final = ("crash", _EXIT)
# Overhead of a frame: the header of a bytes object and its slot in the list.
_ENTRY_BYTES: Final = 48
# A token in a part's start is an int object and its slot in a tuple.
_TOKEN_BYTES: Final = 40
_MIB: Final = 1 << 20
_LOOK_S: Final = 0.5
# How many frames a file of all steps may lag behind: about a minute of a busy engine.
_MOST_BEHIND: Final = 50_000
# In case the disk hangs: an engine that ends or dies waits no longer than this.
_LONGEST_WRITE_S: Final = 10.0


# The open recorders of this process: a signal reaches all of them.
_recorders: Final[weakref.WeakSet[FlightRecorder]] = weakref.WeakSet()
# A forked process has its parent's recorders without their threads: it would wait for files that nobody writes.
os.register_at_fork(after_in_child=_recorders.clear)
_numbers: Final = itertools.count(1)
# The handlers of this process for the signals that tell it to stop, while a recorder is asked first.
_own_stops: Final[dict[int, _Handler]] = {}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings in ``LOCKSTEP_RECORD_OPTIONS``, such as ``steps=4096 stall_s=60``.

    The ring holds the last ``steps`` plans, in at most ``mib``. It is written after ``stall_s`` seconds without a plan
    despite open requests; 0 turns that off. With ``all``, every step goes to a file at once, and no ring is kept. With
    ``redact``, token ids are replaced.
    """

    steps: int = 4096
    mib: int = 64
    stall_s: float = 60.0
    redact: bool = False
    all: bool = False

    def __post_init__(self) -> None:
        if self.steps < _PARTS or self.mib < 1 or self.stall_s < 0:
            raise ValueError(f"steps are {_PARTS} or more, mib 1 or more, stall_s 0 or more; got {self}")


def read_options(text: str) -> Options:
    """Parse the options. Raises ValueError that names the wrong word."""
    words = dict([word.partition("=")[::2] for word in text.split()])
    return msgspec.convert(words, Options, strict=False)


class NotRecordedError(Exception):
    """A request or call that a flight cannot carry: it ends the recording, because no replay would be right."""


class _Part:
    """Consecutive packed frames of a ring, after the state in ``start``; None for a new scheduler."""

    __slots__ = ("bytes_of_frames", "bytes_of_start", "frames", "plans", "start")

    def __init__(self, start: Beginning | None) -> None:
        self.start = start
        self.frames: list[bytes] = []
        self.plans = 0
        self.bytes_of_frames = 0
        self.bytes_of_start = 0 if start is None else _TOKEN_BYTES * start.tokens

    @property
    def bytes(self) -> int:
        return self.bytes_of_start + self.bytes_of_frames


class FlightRecorder:
    """The recorder of one scheduler. ``snapshot`` returns the state that a replay needs to start with the next frame.

    ``event`` and ``planned`` belong to the engine's loop; any thread may call ``leave``.
    """

    def __init__(
        self,
        header: FlightHeader,
        folder: Path,
        options: Options,
        snapshot: Callable[[], Beginning],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.written: list[Path] = []
        self.failure = ""
        self._header = header
        self._folder = folder
        # A process's second engine doesn't overwrite the files of its first.
        number = next(_numbers)
        self._process = f"{Path(header.adapter).stem}{number if number > 1 else ''}-{os.getpid()}"
        self._snapshot = snapshot
        self._clock = clock
        self._began = clock()
        self._parts: deque[_Part] = deque([_Part(None)])
        self._moved = self._began
        self._live = 0
        # The last plans, if they were empty.
        self._empty: Planned | None = None
        self._empty_times = 0
        self._has_stalled = False
        # The file written at the engine's end, until the engine does something after all.
        self._ended: Path | None = None
        # The file written when the engine was told to stop: later, its requests are aborted.
        self._stopped: Path | None = None
        self._asked = threading.Event()
        self._closed = False
        # A signal may interrupt the thread that writes.
        self._writing = threading.RLock()
        self._redactor = Redactor() if options.redact else None
        self._stream = _Stream(self._name(ALL), header, self._redactor) if options.all else None
        if self._stream is not None:
            # An engine may be dropped without being closed.
            weakref.finalize(self, self._stream.close)
        _recorders.add(self)

    @property
    def is_on(self) -> bool:
        return not self.failure

    @property
    def now(self) -> float:
        """Seconds since the recording began."""
        return self._clock() - self._began

    # -- in the engine's loop --

    def event(self, frame: Event, *, moves: bool = False) -> None:
        """Record an event. ``moves``: the engine made progress on a request."""
        if not self.is_on:
            return
        try:
            data = packed(frame)
        except (TypeError, ValueError) as exc:
            self.fail(exc)
        else:
            self.packed_event(data, moves=moves)

    def packed_event(self, data: bytes, *, moves: bool = False) -> None:
        """Record a frame that the caller packed."""
        if moves:
            self._moved = self._clock()
        self._append(data)

    def planned(self, frame: Planned, live: int) -> None:
        """Record a plan and the number of open requests."""
        if frame.is_empty:
            self.planned_nothing(frame.plan, frame.now, live)
        else:
            self.packed_plan(packed(frame), live, moves=bool(frame.shares))

    def packed_plan(self, data: bytes, live: int, *, moves: bool = True) -> None:
        """Record a plan that the caller packed; a plan without shares moves no request."""
        if moves or not live or not self._live:
            self._moved = self._clock()
            self._has_stalled = False
        self._live = live
        self._append(data)
        part = self._parts[-1]
        part.plans += 1
        # The start does not count: with long texts it alone may exceed this, and every plan would begin a part.
        if self._stream is None and (
            part.plans * _PARTS >= self.options.steps or part.bytes_of_frames * _PARTS >= self.options.mib * _MIB
        ):
            self._begin_part()

    def planned_nothing(self, plan: int, now: float, live: int) -> None:
        """Count an empty plan. An idle engine may plan nothing a thousand times a second."""
        if not live or not self._live:
            self._moved = self._clock()
            self._has_stalled = False
        self._live = live
        self._ended = None
        if self._empty is None:
            self._empty, self._empty_times = Planned(plan=plan, now=round(now, MICROSECONDS), shape=0), 0
        self._empty_times += 1

    def fail(self, exc: Exception) -> None:
        """End the recording; the engine continues."""
        if not self.failure:
            self.failure = f"{type(exc).__name__}: {exc}"
            self._parts.clear()
            self._parts.append(_Part(None))
            _log.warning("the flight recorder has ended, the engine has not: %s", self.failure)

    def _append(self, data: bytes) -> None:
        if self.failure:
            return
        self._ended = None
        if self._empty is not None:
            empty, self._empty = self._empty_ones(self._empty), None
            self._append(packed(empty))
        if self._stream is None:
            part = self._parts[-1]
            part.frames.append(data)
            part.bytes_of_frames += _ENTRY_BYTES + len(data)
        elif not self._stream.put(data):
            self.fail(OSError(f"the file {self._stream.path} cannot be written, or is {_MOST_BEHIND} frames behind"))

    def _empty_ones(self, first: Planned) -> Planned:
        return msgspec.structs.replace(first, times=self._empty_times)

    def _begin_part(self) -> None:
        try:
            part = _Part(self._snapshot())
        except Exception as exc:  # noqa: BLE001 - the engine's requests are not as expected
            self.fail(exc)
            return
        self._parts.append(part)
        while len(self._parts) > _PARTS + 1 or sum([one.bytes for one in self._parts]) > self.options.mib * _MIB:
            if len(self._parts) == 1:
                return
            self._parts.popleft()

    # -- in any thread --

    def leave(self, why: str, error: str = "") -> Path | None:
        """Write the ring and return the file; None if the recording has ended or nothing was written.

        The file of an engine's end stays its last one, because no later file would have the exception: it is renewed as
        the newest instead.
        """
        if not self.is_on:
            return None
        ended = self._ended or (self._stopped if why == _EXIT else None)
        if ended is not None:
            with contextlib.suppress(OSError):
                os.utime(ended)
            return ended
        if self._stream is None and is_full(self._folder, self._process, why):
            _log.warning(
                "the flight recorder has not written %r: %s has %d flights of this process, the most; move some away",
                *(why, self._folder, len(flights_of(self._folder, self._process))),
            )
            return None
        if not self._writing.acquire(timeout=_LONGEST_WRITE_S):
            _log.warning("the flight recorder has not written %r: the disk has not taken an earlier file", why)
            return None
        try:
            path = self._leave(End(why=why, now=self.now, error=error))
        finally:
            self._writing.release()
        if why in _ENDS:
            self._ended = path
        return path

    def _leave(self, end: End) -> Path | None:
        if self._stream is not None:
            # Later frames belong to the file too, unless the engine ends.
            if end.why in _ENDS:
                self._stream.put(packed(end))
                # An engine that reports its death may be killed at once.
                self._stream.write_out(_LONGEST_WRITE_S)
            return self._stream.path
        try:
            # A pid may have belonged to an earlier process that left files too.
            number = 1 + max(map(self._number_of, flights_of(self._folder, self._process)), default=0)
            path = self._name(f"{number}-{end.why}")
            write_frames(path, self._frames(end), Redactor() if self.options.redact else None)
        except Exception as exc:  # noqa: BLE001 - a full disk, or an object that cannot be encoded
            self.fail(exc)
            return None
        self.written.append(path)
        _log.warning("the flight recorder has written %s (%s)", path, end.why)
        return path

    def _frames(self, end: End) -> Iterable[AnyFrame]:
        parts = [(part.start, list(part.frames)) for part in list(self._parts)]
        empty = self._empty
        yield self._header
        if parts[0][0] is not None:
            yield parts[0][0].whole()
        for _, frames in parts:
            yield from map(unpacked, frames)
        if empty is not None:
            yield self._empty_ones(empty)
        yield end

    def stop(self) -> None:
        """Write the ring of an engine that is told to stop with open requests, before it aborts them.

        A file of all steps goes on: the engine may complete its requests first. The announcement gets a new time, for
        which the engine's parent may wait.
        """
        if self._stream is not None:
            self._stream.write_out(_LONGEST_WRITE_S)
        elif self._live:
            self._stopped = self.leave(_EXIT)
        with contextlib.suppress(OSError):
            os.utime(self._live_file)

    def look(self) -> None:
        """Write the ring if a write was requested, or if no request has moved for too long."""
        if self._asked.is_set():
            self._asked.clear()
            self.leave("signal")
        stall_s = self.options.stall_s
        if stall_s and self._live and not self._has_stalled and self._clock() - self._moved >= stall_s:
            self._has_stalled = True
            self.leave("stall")

    def ask(self) -> None:
        """Request a write of the ring."""
        self._asked.set()

    def watch(self) -> None:
        """Start the watching thread, handle the signals, and announce this engine.

        Python handles signals only in the main thread. Without its handler the signal would end the engine, so the
        announcement says whether to send it.
        """
        watching = (weakref.ref(self), self._asked)
        threading.Thread(target=_watch, args=watching, name="flight-recorder", daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            _follow_stops()
            if signal.getsignal(SIGNAL) is signal.SIG_DFL:
                signal.signal(SIGNAL, _ask_all)
        hears = HEARS if signal.getsignal(SIGNAL) is _ask_all else DEAF
        with contextlib.suppress(OSError):
            self._live_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A reader sends a signal to the process that it names: half of a number is another process.
            with open_whole(self._live_file) as file:
                file.write(f"{os.getpid()} {hears} {psutil.Process().create_time()}".encode())

    @property
    def watches(self) -> bool:
        return self.is_on and not self._closed

    def write_out(self, timeout_s: float) -> None:
        """Flush the file of all steps, unless the disk takes too long."""
        if self._stream is not None:
            self._stream.write_out(timeout_s)

    def close(self) -> None:
        """End the thread and the file of all steps; idempotent."""
        self._closed = True
        _recorders.discard(self)
        if self._stream is not None:
            self._stream.close()
        self._live_file.unlink(missing_ok=True)

    @property
    def _live_file(self) -> Path:
        return self._folder / f"{self._process}{LIVE_SUFFIX}"

    def _name(self, what: str) -> Path:
        return self._folder / f"{self._process}-{what}{SUFFIX}"

    def _number_of(self, path: Path) -> int:
        number = path.name.removeprefix(f"{self._process}-").partition("-")[0]
        return int(number) if number.isdecimal() else 0


def flights_of(folder: Path, process: str) -> list[Path]:
    """Return the flights that a process left in a folder; their names and its live file's start with ``process``."""
    return [path for path in folder.glob(f"*{SUFFIX}") if path.name.startswith(f"{process}-")]


def is_full(folder: Path, process: str, why: str = "") -> bool:
    """Whether a process has left as many flights as it may; the last place is reserved for its end."""
    return len(flights_of(folder, process)) >= MOST_FILES - (why not in _ENDS)


def _watch(of: weakref.ref[FlightRecorder], asked: threading.Event) -> None:
    """Watch a recorder until it is closed or its engine is dropped."""
    while True:
        asked.wait(_LOOK_S)
        recorder = of()
        if recorder is None or not recorder.watches:
            return
        recorder.look()
        del recorder


def _ask_all(*_: int | FrameType | None) -> None:
    """Request a write of all rings: the signal handler."""
    for recorder in list(_recorders):
        recorder.ask()


def _follow_stops() -> None:
    """Handle the signals that would end this process or that it handles itself; KeyboardInterrupt passes the hooks."""
    for number in _STOPS:
        own = signal.getsignal(number)
        if own not in (None, signal.SIG_IGN, signal.default_int_handler, _stop_all):
            _own_stops[number] = own
            signal.signal(number, _stop_all)


def _stop_all(number: int, frame: FrameType | None) -> None:
    """Write all rings once, then do what the process would have done: the signal handler."""
    own = _own_stops.pop(number, signal.SIG_DFL)
    signal.signal(number, own)
    for recorder in list(_recorders):
        recorder.stop()
    if callable(own):
        own(number, frame)
    else:
        os.kill(os.getpid(), number)


def write_out() -> None:
    """Flush this process's files of all steps."""
    for recorder in list(_recorders):
        recorder.write_out(_LONGEST_WRITE_S)


class _Stream:
    """A file of all steps, written by its own thread; the loop never waits for it."""

    def __init__(self, path: Path, header: FlightHeader, redactor: Redactor | None) -> None:
        self.path = path
        self._redactor = redactor
        # None marks the end; an event is set once everything before it is in the file.
        self._frames: deque[bytes | threading.Event | None] = deque([packed(header)])
        self._there = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="flight-file", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> bool:
        """Queue a packed frame; False once the file can't be written."""
        self._frames.append(data)
        if not self._there.is_set():
            self._there.set()
        if len(self._frames) > _MOST_BEHIND:
            self._frames.clear()
            return False
        return not self._failed

    def write_out(self, timeout_s: float) -> None:
        written = threading.Event()
        self._frames.append(written)
        self._there.set()
        if not self._failed and not written.wait(timeout_s):
            self._failed = True

    def close(self) -> None:
        """Write the queued frames, unless the disk takes too long."""
        self._frames.append(None)
        self._there.set()
        if not self._failed:
            self._thread.join(_LONGEST_WRITE_S)

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open_private(self.path) as file:
                while True:
                    self._there.wait()
                    self._there.clear()
                    while self._frames:
                        data = self._frames.popleft()
                        match data:
                            case None:
                                return
                            case bytes():
                                file.write(_line(unpacked(data), self._redactor))
                            case _:
                                file.flush()
                                data.set()
                    file.flush()
        except Exception as exc:  # noqa: BLE001 - a full disk, or an object that cannot be encoded
            self._failed = True
            _log.warning("%s ends here: %s", self.path, exc)
            for waiting in [one for one in self._frames if isinstance(one, threading.Event)]:
                waiting.set()
            self._frames.clear()


def _line(frame: AnyFrame, redactor: Redactor | None) -> bytes:
    return line_of(frame if redactor is None else redactor.redact(frame))


def write_frames(path: Path, frames: Iterable[AnyFrame], redactor: Redactor | None = None) -> None:
    """Write a flight; the file appears whole, readable by its owner only. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_whole(path) as file:
        for frame in frames:
            file.write(_line(frame, redactor))


def recorder_of(
    environment: Mapping[str, str], header: FlightHeader, snapshot: Callable[[], Beginning]
) -> FlightRecorder | None:
    """Make and start the recorder that the environment asks for; None if it asks for none or its options are wrong."""
    folder = environment.get(FOLDER_VARIABLE)
    if not folder:
        return None
    try:
        options = read_options(environment.get(OPTIONS_VARIABLE, ""))
    except ValueError as exc:
        _log.warning("nothing is recorded: %s is wrong: %s", OPTIONS_VARIABLE, exc)
        return None
    recorder = FlightRecorder(header, Path(folder), options, snapshot)
    recorder.watch()
    return recorder
