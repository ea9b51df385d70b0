"""Runs the same again, here or in a fresh process with another hash seed: the determinism self-test."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import switched_on
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.core.translation import Translated
from scripted.report.rerun import Rerun, recording_reader
from scripted.report.step_log import log_of_adapter
from scripted.script.bounded_command import run_bounded
from scripted.sdk.flight.live import flight_of
from scripted.sdk.flight.reader import is_flight, read_flight
from scripted.sdk.flight.standing import AsksServers, Stand, TellsWhoStands, report_of
from scripted.sdk.recording import recorded_adapter
from scripted.search.execution import record

_ANOTHER_HASH_SEED = "4711"
_LIMIT_S = 600
_SHOWN_CHARACTERS = 800


def rerun(target: str, *, until: int | None = None, mutant: str | None = None, last_steps: int | None = None) -> Rerun:
    """Run a schedule's line, or replay a recording's file. Raises the target's errors.

    ``last_steps`` of a recording are kept as records, which takes most of the time; None keeps all.
    """
    if is_recording(target):
        name = _adapter_of(Path(target))
        with switched_on(adapter_named(name), mutant):
            return recording_reader(name).replay_recording(Path(target), until=until, last_steps=last_steps)
    schedule = Schedule.parse(target)
    with switched_on(schedule.adapter, mutant):
        return _run(schedule, until)


def is_recording(target: str) -> bool:
    """Whether a target is a file; a schedule's line may be too long for a file name."""
    try:
        return Path(target).is_file()
    except OSError:
        return False


def schedule_of_recording(path: Path, *, until: int | None = None, mutant: str | None = None) -> Translated:
    """Translate a recording's file into a schedule, up to a step, and count the steps that launch the same.

    Raises the errors of a bad file.
    """
    name = _adapter_of(path)
    reader = recording_reader(name)
    with switched_on(adapter_named(name), mutant):
        converted = reader.schedule_of_recording(path, until=until)
    _, records = record(converted.schedule)
    launched = [reader.plan_of(records[step - 1]) if step <= len(records) else None for step in converted.steps]
    pairs = zip(converted.plans, launched, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return converted._replace(same_steps=same)


def stands_in(where: str) -> tuple[Path, Sequence[Stand], Iterator[str]]:
    """Return a recording, the requests stuck at its end, and the report about them.

    For a running server, given by its recorder's folder or by the URL of an engine of this project, the recording has
    its last steps. Raises the errors of a bad file, and ScriptDefinitionError for a server that cannot be asked.
    """
    asked = adapter_named(DEFAULT_ADAPTER)
    path = (
        asked.recording_of_server(where)
        if "://" in where and isinstance(asked, AsksServers)
        else flight_of(Path(where))
    )
    name = _adapter_of(path)
    adapter = adapter_named(name)
    if not isinstance(adapter, TellsWhoStands):
        raise ScriptDefinitionError(f"the adapter {name} cannot tell which requests are stuck; replay {path} instead")
    stands = adapter.stands_in(path)
    return path, stands, report_of(stands, _error_of(path))


def _error_of(path: Path) -> str:
    """Return the exception that ended the recorded engine; empty if none did."""
    end = read_flight(path).end if is_flight(path) else None
    return "" if end is None else end.error


def _adapter_of(path: Path) -> str:
    """Return the adapter whose steps a file has; a file that names none is read as the engine's own."""
    return recorded_adapter(path) or DEFAULT_ADAPTER


def rerun_in_fresh_process(target: str, *, until: int | None = None, mutant: str | None = None) -> Rerun:
    """Run the same in a fresh process with another hash seed."""
    arguments = [target, "" if until is None else str(until), mutant or ""]
    here = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONHASHSEED": _ANOTHER_HASH_SEED, "PYTHONPATH": here}
    command = [sys.executable, "-m", "scripted.reruns", *arguments]
    done = run_bounded(command, _LIMIT_S, environment=environment)
    if done.returncode:
        said = done.stderr.decode()[-_SHOWN_CHARACTERS:]
        raise HarnessError(f"the run in a fresh process failed with status {done.returncode}: {said}")
    return msgspec.msgpack.decode(done.stdout, type=Rerun)


def _run(schedule: Schedule, until: int | None) -> Rerun:
    outcome, records = record(schedule)
    failure = outcome.failure
    error = None if failure is None else f"{failure.type}: {failure.text}"
    log = log_of_adapter(schedule.adapter, records[:until], schedule.config)
    if error is not None and (until is None or until >= len(records)):
        log = log.failing(error)
    return Rerun(
        log,
        error,
        adapter=schedule.of,
        config=dict(schedule.adapter.config_words(schedule.config)),
        schedule=str(schedule),
        unreached=tuple(map(str, outcome.unreached)),
        where="" if failure is None else failure.place,
    )


def _answer(target: str, until: str, mutant: str) -> None:
    """Write every step to standard output; runs in the fresh process."""
    again = rerun(target, until=int(until) if until else None, mutant=mutant or None)
    sys.stdout.buffer.write(msgspec.msgpack.encode(again))


if __name__ == "__main__":
    _answer(*sys.argv[1:])
