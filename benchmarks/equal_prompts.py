"""Equal prompts that arrive together: the first tokens and the work, by how many tokens a wait must spare.

The engine in one process, in its CPU time, as in ``benchmarks.mixed_chunk``: other load disturbs little. Run: ``python
-m benchmarks.equal_prompts``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from rich.table import Table

from benchmarks.checkpoints import make_checkpoint
from benchmarks.machine import print_with_machine
from benchmarks.measurement import in_turn
from benchmarks.mixed_chunk import WORDS, Pipeline
from engine.core.config import EngineConfig
from engine.core.messages import Generate, SamplingParams
from engine.core.scheduler import shared_prompts
from lockstep.interruption import interruptible

NEVER: Final = 1_000_000
NEW_TOKENS: Final = 8


@dataclass
class Seen:
    """First tokens in ms, and for each burst the CPU time of its stages in ms and the prompt tokens computed."""

    first: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


def burst(pipeline: Pipeline, ids: tuple[int, ...], clients: int, seen: Seen) -> None:
    """Ask for the same prompt as many times at once, and wait for the last output."""
    begun, spent, number = pipeline.now, pipeline.spent, len(seen.spent)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    events = [Generate(rid=f"{number}-{one}", prompt_ids=ids, sampling=sampling) for one in range(clients)]
    left = {event.rid: NEW_TOKENS for event in events}
    outputs = pipeline.step(*events)
    while True:
        for output in outputs:
            if left[output.rid] == NEW_TOKENS:
                seen.first.append((pipeline.now - begun) * 1e3)
                seen.computed.append(len(ids) - output.cached_tokens)
            left[output.rid] -= len(output.token_ids)
        if not any(left.values()):
            break
        outputs = pipeline.step()
    seen.spent.append((pipeline.spent - spent) * 1e3)


def main() -> None:
    """Print a row for each pipeline, prompt length and constant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--least-spared", type=int, nargs="+", default=[32, 64, 256, NEVER])
    parser.add_argument("--rounds", type=int, default=20, help="how often each way is measured, alternating")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)  # noqa: S311 - a workload is no secret
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), "float32", "S")
        base = EngineConfig(model=name, device="cpu", backend="torch", max_total_tokens=16_384)
        depths: dict[str, dict[str, Any]] = {
            "1 stage, a step ahead": {"async_scheduling": True},
            "2 stages": {"pp_size": 2},
            "4 stages": {"pp_size": 4},
        }
        pipelines = {depth: Pipeline(base.model_copy(update=changed)) for depth, changed in depths.items()}
        constants: list[int] = arguments.least_spared
        lengths: list[int] = arguments.prompt_tokens
        seen = {(d, n, c): Seen() for d in depths for n in lengths for c in constants}
        for number in range(arguments.rounds):
            for depth, length, constant in in_turn(list(seen), number):
                with patch.object(shared_prompts, "LEAST_SPARED_TOKENS", constant):
                    ids = tuple(draw.choices(WORDS, k=length))
                    burst(pipelines[depth], ids, arguments.clients, seen[depth, length, constant])
    heads = ("first token p50", "p99", "prompt tokens computed", "CPU of a burst")
    table = Table("pipeline", "prompt", "waits from", *heads)
    for (depth, length, constant), one in seen.items():
        p50, p99 = (f"{ms:,.1f} ms" for ms in np.percentile(one.first, (50, 99)))
        computed = f"{sum(one.computed) / arguments.rounds:,.0f} of {length * arguments.clients:,}"
        least = "never" if constant >= NEVER else f"{constant} tokens"
        table.add_row(depth, str(length), least, p50, p99, computed, f"{np.median(one.spent):,.1f} ms")
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.equal_prompts"):
        main()
