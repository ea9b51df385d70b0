"""Streams beside a long prompt, by ``mixed_chunk`` and the bounds of gaps: the engine in one process, in its CPU time.

Time is each stage's CPU time for each microbatch, which other load disturbs little: a stage begins a microbatch when it
is launched, the stage before has finished it, and the stage has finished its previous one. Run: ``python -m
benchmarks.mixed_chunk``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.table import Table

from benchmarks.checkpoints import make_checkpoint
from benchmarks.machine import print_with_machine
from benchmarks.measurement import in_turn
from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import Completion, Event, Generate, SamplingParams, TokenOutput
from engine.core.plan import Microbatch
from engine.core.scheduler import Scheduler
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from lockstep.interruption import interruptible

STREAM_TOKENS: Final = 6_000
WARM_TOKENS: Final = 16
LONG: Final = "long"
WORDS: Final = range(1, 250)


@dataclass
class Seen:
    """Gaps of streams during a long prompt, the prompt's first token, tokens per CPU second."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Pipeline:
    """All stages in this process. ``now`` is the scheduler's time, in seconds of CPU time."""

    def __init__(self, config: EngineConfig) -> None:
        limits = Limits.of(config, read_facts(config))
        self.scheduler = Scheduler(limits)
        self.now = 0.0
        self.spent = 0.0
        self._runners = [StageRunner(config, limits, stage) for stage in range(config.pp_size)]
        self._free = [0.0] * config.pp_size
        self._results: deque[tuple[float, Completion]] = deque()

    def step(self, *events: Event) -> list[TokenOutput]:
        """Do one step of the scheduler with these events, or with the next result if there is nothing to launch."""
        began = time.process_time()
        result = self.scheduler.step(events, self.now)
        self.now += time.process_time() - began
        if result.microbatch is not None:
            self._launch(result.microbatch)
        elif self._results:
            ended, completion = self._results.popleft()
            self.now = max(self.now, ended)
            return self._outputs(result.replies) + self.step(completion)
        return self._outputs(result.replies)

    def _outputs(self, replies: Any) -> list[TokenOutput]:
        return [reply for reply in replies if isinstance(reply, TokenOutput)]

    def _launch(self, microbatch: Microbatch) -> None:
        output: Any = None
        ended = self.now
        for number, runner in enumerate(self._runners):
            began = time.process_time()
            output = runner.forward(microbatch) if number == 0 else runner.forward(microbatch, output)
            took = time.process_time() - began
            self.spent += took
            ended = self._free[number] = max(ended, self._free[number]) + took
        if not isinstance(output, Completion) or output.error is not None:
            raise SystemExit(f"error: a microbatch must give tokens, got {output}")
        self._results.append((ended, output))


def play(config: EngineConfig, arguments: argparse.Namespace, seed: int, seen: Seen) -> None:
    """Run streams, then add a long prompt, up to its first token and the streams' next ones."""
    pipeline, draw = Pipeline(config), random.Random(seed)  # noqa: S311 - a workload is no secret
    streams = [f"s{number}" for number in range(arguments.streams)]
    ticks: dict[str, list[float]] = {rid: [] for rid in (*streams, LONG)}

    def step(*events: Event) -> None:
        for output in pipeline.step(*events):
            ticks[output.rid] += [pipeline.now] * len(output.token_ids)

    def ask(rid: str, prompt: int, tokens: int) -> Generate:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        return Generate(rid=rid, prompt_ids=tuple(draw.choices(WORDS, k=prompt)), sampling=sampling)

    step(*(ask(rid, 32, STREAM_TOKENS) for rid in streams))
    while min(len(ticks[rid]) for rid in streams) < WARM_TOKENS:
        step()
    begun, spent = pipeline.now, pipeline.spent
    step(ask(LONG, arguments.prompt_tokens, 1))
    while not ticks[LONG]:
        step()
    ended, spent = pipeline.now, pipeline.spent - spent
    while any(ticks[rid][-1] <= ended for rid in streams):
        step()
    for rid in streams:
        gaps = [(a, b) for a, b in pairwise(ticks[rid]) if b >= begun and a <= ended]
        seen.gaps += [(b - a) * 1e3 for a, b in gaps]
    decoded = sum(begun < tick <= ended for rid in streams for tick in ticks[rid])
    seen.first.append((ticks[LONG][0] - begun) * 1e3)
    seen.rates.append((decoded + arguments.prompt_tokens) / spent)


def main() -> None:
    """Print a row for each number of stages and each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("embedded", "S", "M"), default="S")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2, help="how often each setting is measured, alternating")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--chunk", type=int, nargs="+", default=[512], help="values of chunked_prefill_size")
    parser.add_argument(
        "--max-gap-ms", type=int, nargs="*", default=[50], help="values of max_gap_ms, in addition to none"
    )
    parser.add_argument("--max-gap-steps", type=int, nargs="*", default=[4], help="values of max_gap_steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model: dict[str, Any] = {"chunked_prefill_size": 512, "radix_cache": False, "device": "cpu"}
        model |= {"max_total_tokens": 2 * arguments.prompt_tokens + 16_384, "backend": "torch"}
        if arguments.shape != "embedded":
            make_checkpoint(Path(name), "float32", arguments.shape)
            model["model"] = name
        mixing: list[dict[str, Any]] = [{"mixed_chunk": False}, {"mixed_chunk": True}]
        mixing += [{"mixed_chunk": True, "max_gap_ms": gap} for gap in arguments.max_gap_ms]
        mixing += [{"mixed_chunk": True, "max_gap_steps": steps} for steps in arguments.max_gap_steps]
        ways = [(n, chunk, m) for n in arguments.stages for chunk in arguments.chunk for m in range(len(mixing))]
        seen = {way: Seen() for way in ways}
        for number in range(arguments.rounds):
            for way in in_turn(ways, number):
                stages, chunk, mixed = way
                config = EngineConfig(**(model | {"pp_size": stages, "chunked_prefill_size": chunk} | mixing[mixed]))
                play(config, arguments, number, seen[way])
    heads = ("gap p50", "p99", "longest", "first token of the prompt", "tokens a CPU second")
    table = Table("stages", "parts of", "mixed_chunk", "max_gap_ms", "max_gap_steps", *heads)
    for (stages, chunk, mixed), one in seen.items():
        gaps = [f"{gap:,.0f} ms" for gap in np.percentile(one.gaps, (50, 99, 100))]
        rest = (f"{np.median(one.first):,.0f} ms", f"{np.median(one.rates):,.0f}")
        setting = mixing[mixed]
        bounds = (str(setting.get(name, "-")) for name in ("max_gap_ms", "max_gap_steps"))
        table.add_row(str(stages), str(chunk), "on" if setting["mixed_chunk"] else "off", *bounds, *gaps, *rest)
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.mixed_chunk"):
        main()
