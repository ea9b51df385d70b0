"""Time of one model step on a CPU: transformers' forward, the lean one, OpenVINO.

A step is a stage's work for a microbatch: page tables, attention metadata, all layers, sampling. The forwards alternate
in one process, step by step. Time is CPU time, which other load disturbs less. Run: ``python -m
benchmarks.model_step``.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import checkpoint, vocabulary_of
from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import Completion
from engine.core.plan import Forward, ForwardMode, SamplingSpec, Segment
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from lockstep.interruption import interruptible

SHAPE = "S"
VOCABULARY = vocabulary_of(SHAPE)
CONTEXT_TOKENS = 128
BATCHES = (1, 8, 32)
PROMPTS = (64, 512)
DTYPES = ("float32", "bfloat16")
PAGE_TOKENS = 32
PAGES_A_ROW = 20


class ModelStepBench:
    """One runner of all layers, and the measured steps."""

    def __init__(self, folder: Path, *, lean: bool, openvino: bool = False) -> None:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            backend="openvino" if openvino else "torch",
            page_size=PAGE_TOKENS,
            max_total_tokens=max(BATCHES) * PAGES_A_ROW * PAGE_TOKENS,
        )
        self._runner = StageRunner(config, Limits.of(config, read_facts(config)), 0, lean=lean)
        assert self._runner.model.is_lean is lean, "the lean forward was not taken"
        self._launched = 0

    def prefill(self, row: int, tokens: int, *, cached: int = 0) -> tuple[int, ...]:
        """Compute the first token of a prompt whose first ``cached`` tokens are already computed."""
        ids = tuple((row * 7 + place * 3) % VOCABULARY for place in range(cached, tokens))
        # Scattered, like the pages of an engine that has run for a while.
        pages = tuple(page * max(BATCHES) + row for page in range(PAGES_A_ROW))
        return self._forward(Segment(f"r{row}", row, cached, ids, 0, pages, True, SamplingSpec(seed=0)))

    def decode(self, rows: int, last: tuple[int, ...]) -> tuple[int, ...]:
        """Compute one more token for each of the first ``rows`` rows."""
        return self._forward(
            *[Segment(f"r{row}", row, CONTEXT_TOKENS, (last[row],), 0, (), True) for row in range(rows)]
        )

    def _forward(self, *segments: Segment) -> tuple[int, ...]:
        self._launched += 1
        completion = self._runner.forward(Forward(self._launched, ForwardMode.MIXED, segments))
        assert isinstance(completion, Completion), "the only stage returned hidden states"
        assert completion.error is None, completion.error
        return completion.token_ids


def measure(steps: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Measure the CPU milliseconds of each step, alternating."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append((time.process_time() - start) * 1e3)
    return times


def cases(benches: dict[str, ModelStepBench], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return every measured case by name."""
    results = {}
    for rows in BATCHES:
        last = {
            name: tuple(bench.prefill(row, CONTEXT_TOKENS)[0] for row in range(rows)) for name, bench in benches.items()
        }
        steps = {name: partial(bench.decode, rows, last[name]) for name, bench in benches.items()}
        results[f"decode, batch {rows}"] = measure(steps, repeats)
    for tokens in PROMPTS:
        steps = {name: partial(bench.prefill, 0, tokens) for name, bench in benches.items()}
        results[f"first token of {tokens}"] = measure(steps, max(3, repeats // 10))
    tokens = PROMPTS[-1]
    steps = {name: partial(bench.prefill, 0, tokens, cached=tokens - 1) for name, bench in benches.items()}
    results[f"first token of {tokens}, cached"] = measure(steps, repeats)
    return results


def main() -> None:
    """Print each forward's median and minimum, and its speed-up over transformers'."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="decode steps per case")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; OpenVINO takes one fewer than cores")
    arguments = parser.parse_args()
    console = Console(width=120)
    for dtype in DTYPES:
        with checkpoint(dtype, SHAPE) as folder:
            benches = {"transformers": ModelStepBench(folder, lean=False), "lean": ModelStepBench(folder, lean=True)}
            if importlib.util.find_spec("openvino") is not None:
                benches["openvino"] = ModelStepBench(folder, lean=False, openvino=True)
        torch.set_num_threads(arguments.threads)
        table = Table("step, CPU ms, median (min)", *benches, *[f"{name} is x" for name in list(benches)[1:]])
        for name, times in cases(benches, arguments.repeats).items():
            medians = [statistics.median(values) for values in times.values()]
            shown = [
                f"{median:.2f} ({min(values):.2f})" for median, values in zip(medians, times.values(), strict=True)
            ]
            table.add_row(name, *shown, *[f"{medians[0] / median:.2f}" for median in medians[1:]])
        table.title = f"{dtype}, {arguments.threads} torch thread(s), {torch.backends.cpu.get_cpu_capability()}"
        console.print(table)


if __name__ == "__main__":
    with interruptible("benchmarks.model_step"):
        main()
