"""How many steps a second the scheduler makes over the simulated pipeline, with the audit after every step and without.

Two workloads on four stages with six microbatches in flight: the flagship, a few prompts of two chunks with a flush
between rounds, and the same on a prefix tree that stays full. Digests are computed. Run: ``python
benchmarks/scheduler_steps.py``.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.integrity import audit
from engine.limits import EMBEDDED_FACTS, Limits
from engine.messages import Event, FlushCache, Generate, SamplingParams
from engine.scheduler import Scheduler
from lockstep.interruption import interruptible
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline

REQUESTS = 3
PROMPT_TOKENS = 125
NEW_TOKENS = 4
CHUNK_TOKENS = 64
TARGETS = {False: 60_000, True: 20_000}


def limits() -> Limits:
    """Four stages, two microbatches more than stages in flight, chunks of 64."""
    config = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK_TOKENS)
    return Limits.of(config, EMBEDDED_FACTS)


def requests_of(round_number: int) -> tuple[Generate, ...]:
    """The requests of one round; no two rounds share a page of tokens."""
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
        """Steps until the engine is fully idle."""
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


def measure(*, rounds: int, audited: bool, flushed: bool) -> float:
    """Steps a second over ``rounds`` rounds."""
    bench = SchedulerBench(audited=audited)
    plans: list[tuple[Event, ...]] = [requests_of(number) for number in range(rounds)]
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


def main() -> None:
    """Print the table: best of a few runs, because other processes of the machine only ever slow one down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of three requests a run")
    parser.add_argument("--repeat", type=int, default=3, help="runs of which the best counts")
    arguments = parser.parse_args()
    table = Table(title=f"scheduler steps a second, {REQUESTS} requests a round, best of {arguments.repeat}")
    for column in ("prefix tree", "audit every step", "steps/s", "target"):
        table.add_column(column, justify="right")
    for flushed in (True, False):
        for audited in (False, True):
            best = max(
                measure(rounds=arguments.rounds, audited=audited, flushed=flushed) for _ in range(arguments.repeat)
            )
            tree = "flushed each round" if flushed else "1,024 pages, full"
            table.add_row(tree, "on" if audited else "off", f"{best:,.0f}", f"{TARGETS[audited]:,}" if flushed else "")
    Console().print(table)


if __name__ == "__main__":
    with interruptible("benchmarks.scheduler_steps"):
        main()
