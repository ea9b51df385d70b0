"""A decode step of the engine without its server, with async_scheduling beside without it: CPU and wall time.

Scheduler, pipeline and model in one loop, which steps as a server's does. Both take turns, batch by batch.
Run: ``python -m benchmarks.async_steps``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import SHAPES, make_checkpoint, save_tokenizer, vocabulary_of
from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import Event, Generate, SamplingParams, TokenOutput
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.scheduler.scheduler import Scheduler

__all__ = ["AsyncEngine", "Decodes", "prompts_of"]

PROMPT_TOKENS: Final = 64
# The first decode of a batch may still wait for what the prompts left.
_FIRST_TOKENS: Final = 2


class Decodes(msgspec.Struct):
    """What a batch gave: tokens by request; seconds of a decode step, on the clock and of the CPU."""

    tokens: dict[str, list[int]]
    wall_s: float
    cpu_s: float


class AsyncEngine:
    """One engine of all layers. ``early`` is the runner's: whether it launches what is planned ahead."""

    def __init__(self, config: EngineConfig, *, early: bool | None = None) -> None:
        limits = Limits.of(config, read_facts(config))
        self._pipeline = LocalPipeline(StageRunner(config, limits, 0, early=early))
        self._scheduler = Scheduler(limits)
        self._runs = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decodes:
        """Generate greedily. Raises RuntimeError for a request that fails."""
        self._runs += 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        said: dict[str, list[int]] = {f"{self._runs}.{number}": [] for number in range(len(prompts))}
        events: tuple[Event, ...] = tuple(
            Generate(rid=rid, prompt_ids=tuple(prompt), sampling=sampling)
            for rid, prompt in zip(said, prompts, strict=True)
        )
        began: tuple[float, float] | None = None
        while True:
            result = self._scheduler.step(events, time.monotonic())
            if result.microbatch is not None:
                self._pipeline.launch(result.microbatch)
            for reply in result.replies:
                if not isinstance(reply, TokenOutput) or reply.error is not None:
                    raise RuntimeError(f"a request must give tokens, got {reply}")
                said[reply.rid] += reply.token_ids
            if began is None and min(map(len, said.values())) >= _FIRST_TOKENS:
                began = time.perf_counter(), time.process_time()
            events = ()
            if not result.again:
                completion = self._pipeline.next_completion(None)
                if completion is None:
                    break
                events = (completion,)
        assert began is not None, f"{new_tokens} tokens are not enough to be timed"
        steps = new_tokens - _FIRST_TOKENS
        wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        return Decodes(said, wall_s / steps, cpu_s / steps)


def prompts_of(rows: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random words, the same for each seed."""
    numbers = random.Random(seed)  # noqa: S311 - a workload, no secret
    return [[numbers.randrange(vocabulary) for _ in range(tokens)] for _ in range(rows)]


def main() -> None:
    """Print the medians of the rounds, and the ratio of both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_steps", description=__doc__)
    parser.add_argument("--backend", action="append", choices=("torch", "openvino"), help="may be repeated")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="S")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, action="append", help="rows; may be repeated")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types
    batches = asked.batch or [1, 8]
    table = Table("backend", "batch", "CPU ms without", "with", "ratio", "wall ms without", "with", "ratio")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), asked.dtype, asked.shape)
        save_tokenizer(Path(folder), asked.shape)
        for backend in asked.backend or ["torch"]:
            values: dict[str, Any] = {"model": folder, "device": "cpu", "backend": backend, "threads": 1}
            values |= {"page_size": 32, "max_total_tokens": 16_384, "context_length": 1024, "radix_cache": False}
            engines = [AsyncEngine(EngineConfig(**values, async_scheduling=ahead)) for ahead in (False, True)]
            for rows in batches:
                table.add_row(backend, str(rows), *_compared(engines, rows, asked))
    Console().print(table)


def _compared(engines: Sequence[AsyncEngine], rows: int, asked: argparse.Namespace) -> list[str]:
    """CPU and wall time of both, each with the median of the rounds' own ratios. The first round is not counted."""
    runs: list[list[Decodes]] = []
    for number in range(asked.rounds + 1):
        prompts = prompts_of(rows, PROMPT_TOKENS, vocabulary_of(asked.shape) - 2, number)
        order = engines if number % 2 == 0 else engines[::-1]
        done = {id(engine): engine.run(prompts, asked.new_tokens) for engine in order}
        runs.append([done[id(engine)] for engine in engines])
        assert list(runs[-1][0].tokens.values()) == list(runs[-1][1].tokens.values()), "both must say the same"
    cells = []
    for field in ("cpu_s", "wall_s"):
        pairs = [[getattr(one, field) for one in pair] for pair in runs[1:]]
        cells += [f"{1000 * statistics.median(column):.3f}" for column in zip(*pairs, strict=True)]
        cells.append(f"{statistics.median([ahead / plain for plain, ahead in pairs]):.3f}")
    return cells


if __name__ == "__main__":
    main()
