"""Steps per second of the scheduler over the simulated pipeline, with and without the audit after every step.

Two workloads on four stages with six microbatches in flight: the flagship (a few prompts of two chunks with a flush
between rounds), and the same with a prefix tree that stays full. Digests are computed. One scheduler, one core.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from benchmarks.measurement import Measurement
from engine.core.audit import audit
from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Event, FlushCache, Generate, SamplingParams
from engine.core.scheduler import Scheduler

REQUESTS = 3
PROMPT_TOKENS = 125
NEW_TOKENS = 4
CHUNK_TOKENS = 64
ROUNDS = 1000
REPEATS = 3


def limits() -> Limits:
    """Return limits of four stages, two more microbatches in flight than stages, and chunks of 64."""
    config = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK_TOKENS)
    return Limits.of(config, EMBEDDED_FACTS)


def requests_of(round_number: int) -> tuple[Generate, ...]:
    """Return the requests of one round; no two rounds share a page of tokens."""
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0)
    stride = 1 + round_number % 11
    starts = [round_number * 7 + number * 13 for number in range(REQUESTS)]
    prompts = [tuple((start + i * stride) % 200 for i in range(PROMPT_TOKENS)) for start in starts]
    rids = [f"{round_number}.{number}" for number in range(REQUESTS)]
    return tuple(Generate(rid=rid, prompt_ids=ids, sampling=sampling) for rid, ids in zip(rids, prompts, strict=True))


class SchedulerBench:
    """One scheduler and one pipeline; a microbatch launched in step n completes in step n + depth."""

    def __init__(self, *, audited: bool) -> None:
        self.scheduler = Scheduler(limits())
        self.pipeline = SimulatedPipeline(self.scheduler.limits)
        self._due: deque[int] = deque()
        self._audited = audited

    def run(self, messages: Sequence[Event]) -> None:
        """Step until the engine is fully idle."""
        scheduler, pipeline, due = self.scheduler, self.pipeline, self._due
        depth, events = scheduler.limits.depth, tuple(messages)
        while True:
            if due and due[0] <= scheduler.step_number + 1:
                due.popleft()
                completion = pipeline.next_completion(0)
                assert completion is not None
                events = (completion, *events)
            result = scheduler.step(events, 0.0)
            events = ()
            if result.microbatch is not None:
                pipeline.launch(result.microbatch)
                due.append(scheduler.step_number + depth)
            if self._audited:
                audit(scheduler)
            if scheduler.is_fully_idle:
                return


def measure() -> Iterator[Measurement]:
    """Measure steps per second: the best of a few runs, because other load can only slow a run down."""
    for flushed in (True, False):
        for audited, target in ((True, 20_000), (False, 60_000)):
            tree = "" if flushed else ", a tree of 1,024 pages that is full"
            yield Measurement(
                name=f"scheduler steps, simulated pipeline, audit {'after every step' if audited else 'off'}{tree}",
                value=max(_steps_a_second(audited=audited, flushed=flushed) for _ in range(REPEATS)),
                unit="steps/s",
                target=target if flushed else None,
                at_least=True,
                spread=f"best of {REPEATS}, digests included",
            )


def _steps_a_second(*, audited: bool, flushed: bool) -> float:
    bench = SchedulerBench(audited=audited)
    plans: list[tuple[Event, ...]] = [requests_of(number) for number in range(ROUNDS)]
    if flushed:
        plans = [(FlushCache(call_id="flush"), *plan) for plan in plans]
    start = time.perf_counter()
    for plan in plans:
        bench.run(plan)
    bench.scheduler.digests.digest  # noqa: B018 - the folding of the last steps is part of the price
    seconds = time.perf_counter() - start
    if bench.pipeline.corruptions:
        raise SystemExit(f"the run is worth nothing: {bench.pipeline.corruptions[0]}")
    return bench.scheduler.step_number / seconds
