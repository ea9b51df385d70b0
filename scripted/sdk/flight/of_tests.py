"""Records the engines that other projects' tests start, keeps the flights of failures, and reports whether they replay.

A failure that replays without a model is a race in the scheduler; any other comes from a time-out, numerics, the
environment or the test. Engines in this process and its children record, each into its own file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from lockstep.output_files import open_private
from scripted.core.adapters import adapter_named
from scripted.core.phrases import path_of, plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.script.child import ChildDied, ChildLate, run_in_child
from scripted.sdk.flight.frames import End, line_of
from scripted.sdk.flight.reader import read_flight
from scripted.sdk.flight.recorder import ALL, FOLDER_VARIABLE, LIVE_SUFFIX, OPTIONS_VARIABLE, SUFFIX, write_out
from scripted.sdk.flight.replay import ReplaysFlights, replay_flight

# Every step goes to a file at once, so that an engine that ends in its test loses nothing.
_OPTIONS: Final = "all=true stall_s=0"
_RUNNING: Final = "running"
_LONGEST_REPLAY_S: Final = 120.0
_LONGEST_NAME: Final = 120


class ReplayVerdict(msgspec.Struct, frozen=True):
    """Whether a failure replays, and the sentence that says so; None if nothing can be replayed."""

    replays: bool | None
    text: str


class RecordedTests:
    """The flights of one pytest process, below ``folder``: of running engines, and of failures."""

    def __init__(self, folder: Path) -> None:
        self._kept = folder.absolute()
        self._running = self._kept / f"{_RUNNING}-{os.getpid()}"
        self._sizes: dict[Path, int] = {}
        self._variables = {FOLDER_VARIABLE: str(self._running), OPTIONS_VARIABLE: _OPTIONS}
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def begin(self) -> None:
        """Begin a test."""
        self._sizes = dict(self._files())

    def end(self) -> None:
        """End a test: forget the flights of engines that ended in it."""
        for path, _ in self._files():
            if path not in self._sizes and not _is_open(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Restore the environment; kept flights stay."""
        shutil.rmtree(self._running, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def failed(self, test: str) -> Iterator[tuple[Path, ReplayVerdict]]:
        """Keep the flights of a failed test, and yield each with its verdict."""
        write_out()
        name = re.sub(r"[^\w.]+", "-", test).strip("-")[-_LONGEST_NAME:]
        moved = [path for path, size in self._files() if size != self._sizes.get(path)]
        for number, path in enumerate(moved, 1):
            kept = self._kept / f"{name}{f'-{number}' if number > 1 else ''}{SUFFIX}"
            with open_private(kept) as file:
                file.write(path.read_bytes())
            with contextlib.suppress(ScriptDefinitionError):  # the replay reports it
                _close(kept)
            yield kept, verdict_of(kept)

    def _files(self) -> list[tuple[Path, int]]:
        return [(path, path.stat().st_size) for path in sorted(self._running.glob(f"*{SUFFIX}"))]


def _is_open(path: Path) -> bool:
    """Whether the engine that writes a file of all steps may still write to it."""
    return path.with_name(path.name.removesuffix(f"-{ALL}{SUFFIX}") + LIVE_SUFFIX).exists()


def _close(path: Path) -> None:
    """End the copy of a running engine's flight, so that a replay checks whether its requests make progress."""
    flight = read_flight(path)
    if flight.end is None and not flight.damage and flight.frames:
        with path.open("ab") as file:
            file.write(line_of(End(why="stall", now=0.0)))


def verdict_of(path: Path) -> ReplayVerdict:
    """Replay a flight in a child, which inherits the test's changes to its engine's classes."""
    try:
        said = run_in_child(lambda: msgspec.json.encode(_replayed(path)), _LONGEST_REPLAY_S, is_busy=True)
        return msgspec.json.decode(said, type=ReplayVerdict)
    except ChildLate:
        return ReplayVerdict(
            True, f"the replay does not end within {_LONGEST_REPLAY_S:g} s either: a step does not return"
        )
    except ChildDied as died:
        return ReplayVerdict(None, f"the replay {died}{died.traceback}")


def _replayed(path: Path) -> ReplayVerdict:
    # This child records nothing.
    os.environ.pop(FOLDER_VARIABLE, None)
    try:
        flight = read_flight(path)
        adapter = adapter_named(flight.header.adapter)
        if not isinstance(adapter, ReplaysFlights):
            return ReplayVerdict(None, f"the adapter {flight.header.adapter} replays no flights")
        outcome = replay_flight(adapter, flight)
    except (ScriptDefinitionError, ImportError) as exc:
        return ReplayVerdict(None, f"it cannot be replayed: {exc}")
    if outcome.breaks is not None:
        return ReplayVerdict(True, f"it replays without a model, a race of the scheduler: {outcome.breaks}")
    if outcome.differs is not None:
        found = f"step {outcome.differs.plan}: {outcome.differs.text}; probably not recorded: {outcome.differs.likely}"
        return ReplayVerdict(None, f"the replay leaves the recording, and breaks no promise: {found}")
    return ReplayVerdict(
        False,
        f"it does not replay: {plural(flight.plans, 'plan')} as recorded, and no promise breaks. The cause is not the "
        "scheduler: a time-out, numerics, the environment or the test",
    )


def lines_of(path: Path, verdict: ReplayVerdict) -> Iterator[str]:
    """Yield the lines of a report."""
    yield verdict.text
    more = " --to-script test_race.py" if verdict.replays else ""
    yield f"scripted replay {path_of(str(path))}{more}"
