"""Plans for one pipeline, written by hand: each row's pages stand apart from the others'."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.limits import Limits
from engine.core.messages import Completion
from engine.core.plan import Forward, ForwardMode, Microbatch, SamplingSpec, Segment
from engine.core.scheduler.ports import Pipeline

ROW_TOKENS = 256
WAIT_S = 30.0


class PlanWriter:
    """Knows the progress of each row."""

    def __init__(self, limits: Limits) -> None:
        self._pages = limits.pages_for(ROW_TOKENS)
        self._done: dict[int, int] = {}
        self._launched = 0

    def plan(self, row: int, ids: Sequence[int], *, emits: bool = True) -> Microbatch:
        """The next tokens of a row as a microbatch of its own."""
        start = self._done.get(row, 0)
        self._done[row] = start + len(ids)
        self._launched += 1
        first = row * self._pages
        pages = tuple(range(first, first + self._pages)) if start == 0 else ()
        spec = SamplingSpec(seed=row) if start == 0 else None
        segment = Segment(f"r{row}", row, start, tuple(ids), 0, pages, emits, spec)
        return Forward(self._launched, ForwardMode.PREFILL, (segment,))


def run(pipeline: Pipeline, microbatch: Microbatch) -> Completion:
    """Launch one microbatch and wait for it."""
    pipeline.launch(microbatch)
    return take(pipeline)


def take(pipeline: Pipeline) -> Completion:
    completion = pipeline.next_completion(WAIT_S)
    assert isinstance(completion, Completion), f"no completion within {WAIT_S} s"
    return completion


def generate(pipeline: Pipeline, writer: PlanWriter, row: int, prompt: Sequence[int], count: int) -> list[int]:
    """Prefill in one chunk, then decode one by one."""
    output = list(run(pipeline, writer.plan(row, prompt)).token_ids)
    while len(output) < count:
        output += run(pipeline, writer.plan(row, output[-1:])).token_ids
    return output
