"""The tracing gate: wraps any gate and reports to the front end the timing of each finished request.

Like the recording gate it changes nothing, and it has the same times and numbers: a step's time is the one that the
gate passed to it. The front end makes the spans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from engine.core.messages import Generate, Refusal, Reply, RequestTrace, TokenOutput
from engine.core.plan import Forward
from engine.core.scheduler.ports import Gate, Step, StepResult

# A function from a microbatch to each stage's begin and end, in seconds of the machine's monotonic clock.
StageTimes = Callable[[int], tuple[tuple[float, float], ...]]


class TracedGate:
    """Passes ``inner``'s steps through; ``send`` takes the traces of the requests that a step has ended."""

    def __init__(
        self, inner: Gate, send: Callable[[Sequence[RequestTrace]], None], stage_times: StageTimes | None
    ) -> None:
        self._inner = inner
        self._send = send
        self._stage_times = stage_times
        # By rid, oldest first: a rid may be reused in the step that ends it.
        self._lives: dict[str, deque[RequestTrace]] = {}
        self._step: Step | None = None

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(exc_type, exc, traceback)

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Note the previous step, then return the inner gate's next one."""
        if previous is not None and self._step is not None:
            self._look_at(self._step, previous)
        self._step = self._inner.next_step(previous)
        return self._step

    def _look_at(self, step: Step, result: StepResult) -> None:
        for event in step.events:
            if isinstance(event, Generate):
                life = RequestTrace(rid=event.rid, arrived_s=step.now, arrival_step=result.step)
                self._lives.setdefault(event.rid, deque()).append(life)
        ended = [self._ended(reply, step.now, result.step) for reply in result.replies]
        if isinstance(result.microbatch, Forward):
            self._note_launch(result.microbatch, step.now, result.step)
        if traces := [trace for trace in ended if trace is not None]:
            self._send(traces)

    def _ended(self, reply: Reply, now: float, step: int) -> RequestTrace | None:
        """Note a reply to a request. Returns the request's trace if the reply ends it."""
        if not isinstance(reply, TokenOutput | Refusal) or reply.rid not in self._lives:
            return None
        lives = self._lives[reply.rid]
        if isinstance(reply, TokenOutput):
            life = lives[0]
            if reply.token_ids and life.first_token_s is None:
                life.first_token_s = now
                life.stages = () if self._stage_times is None else self._stage_times(life.prompt_microbatch)
            if reply.finish_reason is None:
                return None
            lives.popleft()
            life.finish_reason, life.error = reply.finish_reason, reply.error
            life.prompt_tokens, life.cached_tokens = reply.prompt_tokens, reply.cached_tokens
            life.completion_tokens = reply.completion_tokens
        else:
            life = lives[reply.behind]
            del lives[reply.behind]
            life.behind, life.refusal, life.error = reply.behind, reply.kind, reply.message
        if not lives:
            del self._lives[reply.rid]
        life.ended_s, life.end_step = now, step
        return life

    def _note_launch(self, microbatch: Forward, now: float, step: int) -> None:
        for segment in microbatch.segments:
            if (lives := self._lives.get(segment.rid)) is None:  # a script added the segment itself
                continue
            life = lives[0]
            if life.launched_s is None:
                life.launched_s, life.launch_step, life.first_microbatch = now, step, microbatch.id
            if segment.emits and life.prompt_microbatch < 0:
                life.prompt_microbatch = microbatch.id
            life.last_microbatch = microbatch.id
            life.microbatches += 1
