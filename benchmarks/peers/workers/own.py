"""This engine without its server: scheduler, memory and model in one loop. Run: ``python -m ...own FOLDER DTYPE``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.peers.workers.asked import Generate as GenerateBatch
from benchmarks.peers.workers.asked import answer_asked
from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import Generate, Reply, SamplingParams, TokenOutput
from engine.model.backend import with_its_pages
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.scheduler.loop import run_loop
from engine.scheduler.ports import Step, StepResult
from engine.scheduler.scheduler import Scheduler

KV_TOKENS: Final = 16_384


class BatchGate:
    """Gives the loop a batch of requests, then the pipeline's completions, until nothing is left to do."""

    def __init__(self, pipeline: LocalPipeline, messages: Sequence[Generate]) -> None:
        self._pipeline = pipeline
        self._messages = tuple(messages)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def next_step(self, previous: StepResult | None) -> Step | None:
        """The batch first; no step without an event, unless the step before asked for it."""
        if previous is None:
            return Step(self._messages, time.monotonic())
        completion = self._pipeline.next_completion(None)
        if completion is not None:
            return Step((completion,), time.monotonic())
        return Step((), time.monotonic()) if previous.again else None


class CountingOutbox:
    """Counts the tokens of the replies. Raises RuntimeError for a reply that is no output."""

    def __init__(self) -> None:
        self.tokens = 0

    def send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if not isinstance(reply, TokenOutput) or reply.error is not None:
                raise RuntimeError(f"a request must give tokens, got {reply}")
            self.tokens += len(reply.token_ids)


def load(folder: Path, dtype: str) -> GenerateBatch:
    """Generates greedily, batched by the scheduler."""
    # No front end and no client needs a core here, and what it is compared with takes all of them.
    threads = len(os.sched_getaffinity(0))
    values = {"model": str(folder), "dtype": dtype, "max_total_tokens": KV_TOKENS, "threads": threads}
    config = with_its_pages(EngineConfig(**values))
    limits = Limits.of(config, read_facts(config))
    pipeline = LocalPipeline(StageRunner(config, limits, 0))
    scheduler = Scheduler(limits)
    batches = 0

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        nonlocal batches
        batches += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        messages = [
            Generate(rid=f"{batches}.{number}", prompt_ids=tuple(prompt), sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        outbox = CountingOutbox()
        run_loop(BatchGate(pipeline, messages), scheduler, pipeline, outbox)
        if outbox.tokens != len(prompts) * new_tokens:
            raise RuntimeError(f"{len(prompts)} requests must give {new_tokens} tokens each, got {outbox.tokens}")

    return generate


def main() -> None:
    """Answer until the pipe is closed."""
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    answer_asked(lambda: load(folder, dtype), read_facts(EngineConfig(model=str(folder))).vocab_size)


if __name__ == "__main__":
    main()
