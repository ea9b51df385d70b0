"""Replays a recording of the engine: it checks every step as in scripts, and compares it with the recorded one.

The format is the engine's own, not the SDK's: production records without the harness, with checksums of outputs and
possibly a checkpoint at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.core.recording import Recording, RecordingError, ReplayDiffers, ReplayGate, read_recording
from engine.core.recording.checkpoint import restored
from engine.core.recording.replay_gate import NullPorts
from engine.core.scheduler import Scheduler, Step, StepRecord, StepResult, run_loop
from scripted.core.violation import Violation
from scripted.report.rerun import Rerun
from scripted_lockstep.oracle.step_checks import EngineOracle
from scripted_lockstep.script.history import record_step
from scripted_lockstep.step_words import event_text, log_of

_SHOWN_STEPS: Final = 20
# Of KV, rows or the host tier: more than any machine holds, and memory for a list of them.
_MOST_PAGES: Final = 1 << 26


class _WatchedGate(ReplayGate):
    """Checks every step as in scripts, and keeps the records from ``first_kept`` on.

    A recording that begins at a checkpoint lacks the content of the cache, so its steps cannot be checked.
    """

    def __init__(self, recording: Recording, scheduler: Scheduler, *, until: int | None, first_kept: int) -> None:
        super().__init__(recording, until=until)
        self.records: list[StepRecord] = []
        self._scheduler = scheduler
        self._first_kept = first_kept
        self._step: Step | None = None
        # Auditing a large cache at each of many thousand steps would take longer than everything else.
        self._checks = None if recording.checkpoint else EngineOracle(recording.header.limits, audits=False)
        # The first promise that the recorded engine broke; the oracle's account is useless after that.
        self.broken: str | None = None
        self.broken_at: int | None = None

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Record and check the previous step, then continue. Raises ReplayDiffers."""
        done = self._step
        if previous is not None and done is not None and previous.step >= self._first_kept:
            self.records.append(record_step(done, previous, self._scheduler))
        self._step = super().next_step(previous)
        if previous is not None and done is not None and self._checks is not None:
            try:
                self._checks.check_step(done.events, previous, self._scheduler)
            except Violation as exc:
                self.broken, self.broken_at, self._checks = f"step {previous.step}: {exc}", previous.step, None
        return self._step

    def note_death(self, exc: Exception) -> None:
        """Record the step in which the scheduler died."""
        if self._step is not None:
            result = StepResult(self._scheduler.step_number, None, (), again=False, deadline=None)
            self.records.append(record_step(self._step, result, self._scheduler, error=f"{type(exc).__name__}: {exc}"))


def replay_engine(
    path: Path, *, until: int | None = None, last_steps: int | None = None
) -> tuple[Rerun, list[StepRecord], Scheduler]:
    """Replay a recording. Returns the records of the steps that were kept, and the scheduler at its end.

    Raises RecordingError for a recording that cannot be replayed, with the last steps' inputs as its notes.
    """
    recording = read_recording(path)
    scheduler, ports = _scheduler_of(path, recording), NullPorts()
    last = recording.header.first_step - 1 + len(recording.steps)
    last = last if until is None else min(until, last)
    gate = _gate_of(recording, scheduler, until, first_kept=1 if last_steps is None else last - last_steps + 1)
    error = differs = None
    try:
        run_loop(gate, scheduler, ports, ports)
    except ReplayDiffers as exc:
        if last_steps is not None and scheduler.step_number < last:
            # The records that explain it were dropped, so run again up to here.
            return replay_engine(path, until=scheduler.step_number, last_steps=last_steps)
        differs = str(exc)
    except Exception as exc:  # noqa: BLE001 - the recorded scheduler may have died of any exception
        error = f"{type(exc).__name__}: {exc}"
        gate.note_death(exc)
    end = recording.end if until is None else None
    if differs is None and error is None and end is not None and recording.checkpoint is None:
        recorded, replayed = end.plan_digest, scheduler.digests.plan_digest
        if replayed != recorded:
            differs = f"every step is as recorded, but the digest is {replayed}, not {recorded}"
    log = log_of(gate.records, recording.header.limits)
    if gate.broken is not None:
        log = log.failing(gate.broken, gate.broken_at)
    rerun = Rerun(
        log=log,
        error=error,
        differs=differs,
        recorded_error=error if end is None else end.error,
        recorded_s=scheduler.now - recording.steps[0].now if recording.steps else 0.0,
        first_step=recording.header.first_step,
        broken=gate.broken,
    )
    return rerun, gate.records, scheduler


def _gate_of(recording: Recording, scheduler: Scheduler, until: int | None, first_kept: int) -> _WatchedGate:
    """Make the gate of a replay. Raises RecordingError, with the last steps' inputs as its notes."""
    try:
        return _WatchedGate(recording, scheduler, until=until, first_kept=first_kept)
    except RecordingError as exc:
        # The recording has only checksums of plans and replies.
        for line in _what_went_in(recording):
            exc.add_note(line)
        raise


def _scheduler_of(path: Path, recording: Recording) -> Scheduler:
    """Make the scheduler of a recording. Raises RecordingError for limits that no engine has."""
    limits, checkpoint = recording.header.limits, recording.checkpoint
    sizes = (limits.rows, limits.total_pages, limits.host_pages, limits.window_pages)
    why = f"{max(sizes)} rows or pages" if max(sizes) > _MOST_PAGES else ""
    try:
        if not why:
            return Scheduler(limits) if checkpoint is None else restored(limits, checkpoint)
    except RecordingError:
        raise
    except (ValueError, LookupError, ArithmeticError) as exc:
        why = f"{type(exc).__name__}: {exc}"
    raise RecordingError(f"{path} has limits that no engine has ({why}); give a file of `engine serve --record FILE`")


def _what_went_in(recording: Recording) -> Iterator[str]:
    for step in recording.steps[-_SHOWN_STEPS:]:
        yield f"step {step.step}, {step.now:.3f} s: {', '.join(map(event_text, step.events)) or 'nothing'}"
    if recording.end is not None and recording.end.error is not None:
        yield f"there it died of {recording.end.error}"
