"""The same run again, here or in a fresh process with another hash seed: the determinism self-test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from engine.errors import EngineError
from engine.recording import Recording, ReplayDiffers, ReplayGate, read_recording
from engine.recording.checkpoint import restored
from engine.recording.replay_gate import NullPorts
from engine.scheduler import Scheduler, Step, StepRecord, StepResult, run_loop
from scripted.adapters.lockstep.bugs.mutants import switched_on
from scripted.adapters.lockstep.oracle.step_checks import Checks
from scripted.adapters.lockstep.script.history import record_step
from scripted.adapters.lockstep.step_words import log_of
from scripted.core.named import OWN, adapter_named
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation
from scripted.report.step_log import StepLog
from scripted.report.trace import ConfigValue, Trace, TraceHeader
from scripted.sdk.recording import is_portable_recording, read_portable_recording, replayed
from scripted.search.execution import record

__all__ = ["Rerun", "is_recording", "replay_engine", "rerun", "rerun_in_fresh_process"]

_ANOTHER_HASH_SEED = "4711"
_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 800


class Rerun(msgspec.Struct, frozen=True):
    """Every step of a run of an ``adapter``, and what it died of, as ``Type: text``, and ``where`` that was raised.

    ``schedule`` is the line that was run, and ``unreached`` are its actions that met nothing to act on; ``config`` are
    its settings.
    ``differs`` says where a recording was left, ``broken`` where its engine first broke a promise. ``recorded_s`` are
    the seconds from the first to the last of its steps that ran; None for a schedule. ``first_step`` is over 1 when it
    began at a checkpoint.
    """

    log: StepLog
    error: str | None = None
    differs: str | None = None
    recorded_error: str | None = None
    recorded_s: float | None = None
    first_step: int = 1
    broken: str | None = None
    adapter: str = OWN
    config: dict[str, ConfigValue] = {}
    schedule: str = ""
    unreached: tuple[str, ...] = ()
    where: str = ""

    def trace(self, title: str, mutant: str | None = None) -> Trace:
        """The run as a file that is viewed."""
        header = TraceHeader(
            title=title,
            adapter=self.adapter,
            config=self.config,
            outcome=self.differs or self.error or self.broken or "passed",
            mutant=mutant,
            died=self.error is not None and bool(self.log.steps) and self.log.steps[-1].error is not None,
        )
        return Trace(header, self.log)

    @property
    def passed(self) -> bool:
        """Every promise was kept, and a recording was followed to its end or its death."""
        followed = self.differs is None and self.error == self.recorded_error
        return followed and (self.broken is None or self.recorded_error is not None)


def rerun(target: str, *, until: int | None = None, mutant: str | None = None, last_steps: int | None = None) -> Rerun:
    """Run a schedule's line, or replay a recording's file. Raises what a bad target raises.

    ``last_steps`` of a recording are kept as records, which is what takes the time; None keeps all.
    """
    if is_recording(target):
        if is_portable_recording(target):
            return _replay_portable(Path(target), until, mutant)
        with switched_on(mutant):
            return replay_engine(Path(target), until=until, last_steps=last_steps)[0]
    schedule = Schedule.parse(target)
    with schedule.adapter.switched_on(mutant):
        return _run(schedule, until)


def is_recording(target: str) -> bool:
    """Whether a target is a file; a schedule's line may be longer than a file name can be."""
    try:
        return Path(target).is_file()
    except OSError:
        return False


def rerun_in_fresh_process(target: str, *, until: int | None = None, mutant: str | None = None) -> Rerun:
    """The same in a fresh process with another hash seed."""
    arguments = [target, "" if until is None else str(until), mutant or ""]
    here = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONHASHSEED": _ANOTHER_HASH_SEED, "PYTHONPATH": here}
    command = [sys.executable, "-m", "scripted.replay.rerun_process", *arguments]
    done = subprocess.run(  # noqa: S603 - this interpreter, and our own module
        command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        said = done.stderr.decode()[-_SHOWN_CHARACTERS:]
        raise EngineError(f"the run in a fresh process failed with status {done.returncode}: {said}")
    return msgspec.msgpack.decode(done.stdout, type=Rerun)


def _run(schedule: Schedule, until: int | None) -> Rerun:
    outcome, records = record(schedule)
    failure = outcome.failure
    error = None if failure is None else f"{failure.type}: {failure.text}"
    log = schedule.adapter.as_log(records[:until], schedule.config)
    return Rerun(
        log,
        error,
        adapter=schedule.of,
        config=dict(schedule.adapter.config_words(schedule.config)),
        schedule=str(schedule),
        unreached=tuple(map(str, outcome.unreached)),
        where="" if failure is None else failure.place,
    )


class _WatchedGate(ReplayGate):
    """Checks every step as scripts are checked, and keeps those from ``first_kept`` on as records.

    A recording that begins at a checkpoint does not say what its cache holds, so its steps cannot be checked.
    """

    def __init__(self, recording: Recording, scheduler: Scheduler, *, until: int | None, first_kept: int) -> None:
        super().__init__(recording, until=until)
        self.records: list[StepRecord] = []
        self._scheduler = scheduler
        self._first_kept = first_kept
        self._step: Step | None = None
        # The engine's own audit of a large cache at each of many thousand steps would take longer than all the rest.
        self._checks = None if recording.checkpoint else Checks(recording.header.limits, audits=False)
        # The first promise that the recorded engine broke; after that its account is no longer of use.
        self.broken: str | None = None

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Record and check the step before, then go on. Raises ReplayDiffers."""
        done = self._step
        if previous is not None and done is not None and previous.step >= self._first_kept:
            self.records.append(record_step(done, previous, self._scheduler))
        self._step = super().next_step(previous)
        if previous is not None and done is not None and self._checks is not None:
            try:
                self._checks.after_step(done.events, previous, self._scheduler)
            except Violation as exc:
                self.broken, self._checks = f"step {previous.step}: {exc}", None
        return self._step

    def note_death(self, exc: Exception) -> None:
        """Record the step that the scheduler died in."""
        if self._step is not None:
            result = StepResult(self._scheduler.step_number, None, (), again=False, deadline=None)
            self.records.append(record_step(self._step, result, self._scheduler, error=f"{type(exc).__name__}: {exc}"))


def replay_engine(
    path: Path, *, until: int | None = None, last_steps: int | None = None
) -> tuple[Rerun, list[StepRecord]]:
    """Replay a recording of the engine; the records are those of the steps that were kept."""
    recording = read_recording(path)
    scheduler, ports = _scheduler_of(recording), NullPorts()
    last = recording.header.first_step - 1 + len(recording.steps)
    last = last if until is None else min(until, last)
    first_kept = 1 if last_steps is None else last - last_steps + 1
    gate = _WatchedGate(recording, scheduler, until=until, first_kept=first_kept)
    error = differs = None
    try:
        run_loop(gate, scheduler, ports, ports)
    except ReplayDiffers as exc:
        if last_steps is not None and scheduler.step_number < last:
            # The records that explain it were not kept: run again, up to here.
            return replay_engine(path, until=scheduler.step_number, last_steps=last_steps)
        differs = str(exc)
    except Exception as exc:  # noqa: BLE001 - what the recorded scheduler died of is what is looked for
        error = f"{type(exc).__name__}: {exc}"
        gate.note_death(exc)
    end = recording.end if until is None else None
    if differs is None and error is None and end is not None and recording.checkpoint is None:
        differs = _digest_difference(end.plan_digest, scheduler.digests.plan_digest)
    recorded_error = error if end is None else end.error
    recorded_s = scheduler.now - recording.steps[0].now if recording.steps else 0.0
    again = Rerun(
        log_of(gate.records, recording.header.limits),
        error,
        differs,
        recorded_error,
        recorded_s,
        recording.header.first_step,
        gate.broken,
    )
    return again, gate.records


def _replay_portable(path: Path, until: int | None, mutant: str | None) -> Rerun:
    recording = read_portable_recording(path)
    adapter = adapter_named(recording.header.adapter)
    with adapter.switched_on(mutant):
        again = replayed(recording, until=until)
    log = adapter.as_log(again.records, again.config)
    return Rerun(log, again.error, again.differs, again.recorded_error, adapter=adapter.name)


def _digest_difference(recorded: str, replayed: str) -> str | None:
    return None if recorded == replayed else f"every step is as recorded, but the digest is {replayed}, not {recorded}"


def _scheduler_of(recording: Recording) -> Scheduler:
    limits, checkpoint = recording.header.limits, recording.checkpoint
    return Scheduler(limits) if checkpoint is None else restored(limits, checkpoint)
