"""The replay gate: feeds the loop from a recording and compares every step with its record.

Needs no pipeline, sockets or clock: the recording has the results and the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from engine.core.errors import EngineError
from engine.core.messages import CacheEvent, OrderAnswer, PipelineEvent, Reply
from engine.core.plan import GrammarOrder, LoraOrder, Microbatch, TransferOrder
from engine.core.recording.format import RecordedStep, Recording, RecordingError, checks_of
from engine.core.scheduler.ports import Step, StepResult


class ReplayDiffers(EngineError, AssertionError):
    """Raised for a replayed step that differs from its record; the text names the step and the first difference."""


class ReplayGate:
    """Replays a recording up to step ``until``. Raises RecordingError for a recording without its beginning."""

    def __init__(self, recording: Recording, *, until: int | None = None) -> None:
        first = recording.header.first_step
        if first != 1 and recording.checkpoint is None:
            raise RecordingError(
                "a replay must begin at the first step or where the engine was fully idle; the recording begins "
                f"with step {first} and has no idle moment; record with `engine serve --record FILE`, which keeps "
                "every step"
            )
        self._steps: Sequence[RecordedStep] = recording.steps
        self._died = recording.end is not None and recording.end.error is not None
        self._most = len(recording.steps) if until is None else max(0, until - first + 1)
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Return the next recorded step; None after the last. Raises ReplayDiffers at the first step that differs."""
        if previous is not None:
            self._compare(self._steps[self._next - 1], previous)
        if self._next >= min(len(self._steps), self._most):
            return None
        step = self._steps[self._next]
        self._next += 1
        return Step(step.events, step.now)

    def _compare(self, recorded: RecordedStep, result: StepResult) -> None:
        if self._died and self._next == len(self._steps):
            raise ReplayDiffers(f"step {recorded.step} completes, but the recorded scheduler died in it")
        plan, said = checks_of(result)
        if recorded.step != result.step:
            raise ReplayDiffers(f"step {result.step} is recorded as step {recorded.step}: a step is missing")
        if plan != recorded.plan:
            raise ReplayDiffers(
                f"step {result.step} launches a microbatch that differs from the recording: {result.microbatch}"
            )
        if said != recorded.said:
            raise ReplayDiffers(
                f"step {result.step} sends replies that differ from the recording: {list(result.replies)}"
            )


class NullPorts:
    """The pipeline and outbox of a replay, which drop everything."""

    ready = False
    takes_more = False

    def launch(self, microbatch: Microbatch) -> None:
        """Do nothing: the completion is in the recording."""

    def send(self, replies: Sequence[Reply]) -> None:
        """Do nothing: the clients of the recorded run are gone."""

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Do nothing: there is no router."""

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:  # noqa: ARG002 - the protocol's
        """Return None: completions come from the recording."""
        return None

    def wake_sources(self) -> Sequence[Any]:
        return ()

    def order_grammar(self, order: GrammarOrder) -> None:
        """Do nothing: the answer is in the recording."""

    def order_lora(self, order: LoraOrder) -> None:
        """Do nothing: the answer is in the recording."""

    def order_transfer(self, order: TransferOrder) -> None:
        """Do nothing: the answer is in the recording."""

    def answers(self) -> Sequence[OrderAnswer]:
        return ()

    def answer_source(self) -> int | None:
        return None

    def close(self) -> None:
        pass
