"""The recording gate: wraps any gate and records each of its steps, after the step.

It changes nothing: the inner gate decides steps, times and order. The step that kills the scheduler is recorded too,
with the exception.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from engine.core.checkpoint import Checkpoint
from engine.core.recording.checkpoint import checkpoint_of
from engine.core.recording.format import End, Header, RecordedStep, checks_of, frame_bytes
from engine.core.recording.redaction import Redactor
from engine.core.scheduler.ports import Gate, Step, StepResult
from engine.core.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


class Sink(Protocol):
    def write(self, frame: bytes) -> None: ...

    @property
    def wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is due before the next frame."""

    def mark(self, frame: Callable[[], bytes]) -> None:
        """Keep the function that makes the checkpoint: a checkpoint may be large, and most are never made."""

    def close(self, *, failed: bool) -> None:
        """Close the sink, once, after the end frame of a loop that has ended or failed."""


class RecordingGate:
    """Records the steps of ``inner`` in ``sinks``. A redactor replaces prompts and tokens by fingerprints."""

    def __init__(
        self, inner: Gate, scheduler: Scheduler, sinks: Sequence[Sink], *, redactor: Redactor | None = None
    ) -> None:
        self._inner = inner
        self._scheduler = scheduler
        self._sinks = sinks
        self._redactor = redactor
        self._step: Step | None = None

    def __enter__(self) -> Self:
        self._inner.__enter__()
        self._write(frame_bytes(Header(limits=self._scheduler.limits, redacted=self._redactor is not None)))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._inner.__exit__(exc_type, exc, traceback)
        finally:
            self._end(exc)

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Record the previous step, then return the inner gate's next one."""
        if previous is not None and self._step is not None:
            self._write_step(self._step, previous.step, checks_of(previous), previous)
            if self._scheduler.is_fully_idle:
                self._offer_checkpoint()
        # Cleared first: an exception of the inner gate does not belong to the previous step.
        self._step = None
        self._step = self._inner.next_step(previous)
        return self._step

    def _end(self, exc: BaseException | None) -> None:
        scheduler = self._scheduler
        died = exc is not None and self._step is not None
        if died and self._step is not None:
            self._write_step(self._step, scheduler.step_number, (0, 0), None)
        end = End(
            step=scheduler.step_number,
            plan_digest=scheduler.digests.plan_digest,
            digest="" if self._redactor is not None else scheduler.digests.digest,
            error=f"{type(exc).__name__}: {exc}" if died else None,
        )
        self._write(frame_bytes(end))
        for sink in self._sinks:
            sink.close(failed=exc is not None)

    def _write_step(self, step: Step, number: int, checks: tuple[int, int], result: StepResult | None) -> None:
        events = step.events
        if self._redactor is not None:
            events = self._redactor.redact(events, result, self._scheduler)
        self._write(frame_bytes(RecordedStep(number, step.now, events, *checks)))

    def _offer_checkpoint(self) -> None:
        wanting = [sink for sink in self._sinks if sink.wants_checkpoint]
        checkpoint = checkpoint_of(self._scheduler) if wanting else None
        if checkpoint is not None:
            for sink in wanting:
                sink.mark(functools.partial(self._frame_of, checkpoint))

    def _frame_of(self, checkpoint: Checkpoint) -> bytes:
        return frame_bytes(checkpoint if self._redactor is None else self._redactor.redact_checkpoint(checkpoint))

    def _write(self, frame: bytes) -> None:
        for sink in self._sinks:
            try:
                sink.write(frame)
            except OSError as exc:
                # A full disk ends the recording, not the engine.
                _log.warning("recording ends after step %s: %s", self._scheduler.step_number, exc)
                self._sinks = [other for other in self._sinks if other is not sink]
