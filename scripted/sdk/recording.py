"""Recordings of SDK machines, one line of JSON per step, and their replay.

A machine is deterministic, so its inputs and their times are enough. Tokens may come from a real model. Lockstep's
engine writes another format, ``engine.core.recording``, because it imports nothing of the harness and keeps checksums
and checkpoints instead of whole outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from scripted.core.machine import close_machine
from scripted.core.phrases import text_of
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.rerun import Rerun
from scripted.report.step_log import log_of_adapter
from scripted.sdk.flight.reader import is_flight, read_header
from scripted.sdk.messages import Event, Record, SdkMachine, Step, Stepped

FORMAT: Final = "lockstep-steps-1"
# The key of the first line that holds the format, and the longest first line.
_FORMAT_WITHIN_BYTES: Final = 200
_LONGEST_HEADER_BYTES: Final = 1 << 20


class Header(msgspec.Struct, frozen=True):
    """The first line: the adapter and the words of its configuration."""

    format: str
    adapter: str
    config: dict[str, str]


class Recording(msgspec.Struct, frozen=True):
    """A recording that was read, without a truncated last line."""

    header: Header
    records: tuple[Record, ...]


class Recorder:
    """Wraps a machine and records its input and output.

    Replay finds the adapter by the name ``adapter``; ``config`` are the words of its configuration. Raises OSError, as
    any file does.
    """

    def __init__(
        self, machine: SdkMachine, path: str | Path, *, adapter: str, config: Mapping[str, object] | None = None
    ) -> None:
        self.machine = machine
        self.depth: int = machine.depth
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - open as long as the machine runs
        words = {name: str(value) for name, value in (config or {}).items()}
        self._write(Header(FORMAT, adapter, words))

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Do one step and record it before returning, even if the machine dies in it."""
        step = Step(tuple(events), now)
        try:
            stepped = self.machine.step(events, now)
        except Exception as exc:
            self._write(Record(step, None, {}, f"{type(exc).__name__}: {text_of(exc)}"))
            raise
        self._write(Record(step, stepped, dict(self.machine.counts())))
        return stepped

    @property
    def is_idle(self) -> bool:
        return self.machine.is_idle

    def counts(self) -> Mapping[str, int]:
        return self.machine.counts()

    def close(self) -> None:
        """Flush the buffer; idempotent."""
        self._file.close()

    def _write(self, line: Header | Record) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def recorded_adapter(path: str | Path) -> str | None:
    """Return the name of the adapter whose steps a file holds; None if the file is not a recording of steps."""
    if is_flight(path):
        return read_header(path).adapter
    with Path(path).open("rb") as file:
        first = file.readline(_LONGEST_HEADER_BYTES)
    if FORMAT.encode() not in first[:_FORMAT_WITHIN_BYTES]:
        return None
    return _header(path, first).adapter


def _header(path: str | Path, line: bytes) -> Header:
    try:
        return msgspec.json.decode(line, type=Header)
    except (ValueError, RecursionError) as exc:
        raise ScriptDefinitionError(f"{path} is no recording of steps: line 1 cannot be read: {exc}") from exc


def read_recording(path: str | Path) -> Recording:
    """Read a recording. Raises ScriptDefinitionError that names file and line for anything else."""
    first, *lines = Path(path).read_bytes().split(b"\n")
    header, records = _header(path, first), []
    # A truncated last line has no line end.
    for number, line in enumerate(lines[:-1], 2):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except (ValueError, RecursionError) as exc:
            raise ScriptDefinitionError(
                f"{path} is no recording of steps: line {number} cannot be read: {exc}"
            ) from exc
    return Recording(header, tuple(records))


def replayed(adapter: Adapter, recording: Recording, *, until: int | None = None) -> tuple[Rerun, list[Record]]:
    """Feed the same steps to a new machine of the adapter, and compare its output."""
    config = adapter.read_config(recording.header.config)
    machine = adapter.new_parts(config, record=True)[0]
    done: list[Record] = []
    differs = error = recorded_error = None
    for number, record in enumerate(recording.records[:until], 1):
        try:
            stepped = machine.step(record.step.events, record.step.now)
        except Exception as exc:  # noqa: BLE001 - the death of the recorded machine is the finding
            error, recorded_error = f"{type(exc).__name__}: {text_of(exc)}", record.error
            done.append(Record(record.step, None, {}, error))
            break
        done.append(Record(record.step, stepped, dict(machine.counts())))
        differs = _difference(number, record, done[-1])
        if differs is not None:
            break
    close_machine(machine)
    words = dict(adapter.config_words(config))
    log = log_of_adapter(adapter, done, config)
    return Rerun(log, error, differs, recorded_error, adapter=adapter.name, config=words), done


def _difference(number: int, then: Record, now: Record) -> str | None:
    """Describe the first field in which two steps differ, with both values."""
    if then.stepped is None or now.stepped is None:
        return f"step {number}: the recorded machine died of {then.error}, this one did not"
    replayed_fields = msgspec.structs.asdict(now.stepped)
    for name, one in msgspec.structs.asdict(then.stepped).items():
        other = replayed_fields[name]
        if one != other:
            return f"step {number}, {name}: {one!r} was recorded, now it is {other!r}"
    if then.counts != now.counts:
        return f"step {number}, counts: {then.counts} was recorded, now it is {now.counts}"
    return None
