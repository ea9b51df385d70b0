"""Time to a prompt's first token: computed, loaded from the host, or hit in the prefix cache, on a CPU.

Scheduler and model run in one process; the three cases take turns, each with its own prompt. Time is CPU time, which
other load disturbs less. Run: ``python -m benchmarks.host_tier``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import checkpoint, vocabulary_of
from benchmarks.one_process import Engine, prompts_of
from engine.core.config import EngineConfig
from engine.core.messages import EvictCache
from lockstep.interruption import interruptible

CASES: Final = ("computed", "from the host", "prefix cache")
PAGE_TOKENS: Final = 32


class HostTierBench:
    """One engine, and requests for one token each."""

    def __init__(self, folder: Path, tokens: int, vocabulary: int) -> None:
        self._engine = Engine(
            EngineConfig(
                model=str(folder),
                device="cpu",
                backend="torch",
                page_size=PAGE_TOKENS,
                chunked_prefill_size=tokens,
                max_total_tokens=8 * tokens,
                host_kv_tokens=8 * tokens,
            )
        )
        self._tokens = tokens
        self._vocabulary = vocabulary

    def first_token(self, seed: int) -> tuple[float, int]:
        """Return the CPU milliseconds until a prompt's first token, and the number of its cached tokens."""
        prompts = prompts_of(1, self._tokens, self._vocabulary, seed)
        cached, start = self._engine.scheduler.counters.cached_tokens, time.process_time()
        self._engine.run(prompts, 1)
        spent = time.process_time() - start
        return spent * 1e3, self._engine.scheduler.counters.cached_tokens - cached

    def turn(self, number: int) -> dict[str, float]:
        """Run each case once, with prompts that only this round uses."""
        times: dict[str, float] = {}
        prompt, filler = 2 * number, 2 * number + 1
        times[CASES[0]], none = self.first_token(prompt)
        times[CASES[2]], hit = self.first_token(prompt)
        self._engine.scheduler.step([EvictCache()], time.perf_counter())
        # Its microbatch carries the pages to the host.
        self.first_token(filler)
        times[CASES[1]], loaded = self.first_token(prompt)
        assert (none, hit) == (0, loaded), f"cached were {none}, {hit} and {loaded} tokens"
        return times


def main() -> None:
    """Print each case's median and minimum, and its speed-up over computing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--shape", choices=("S", "M"), default="S")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    with checkpoint(arguments.dtype, arguments.shape) as folder:
        bench = HostTierBench(folder, arguments.tokens, vocabulary_of(arguments.shape) - 1)
    bench.turn(0)
    turns = [bench.turn(number) for number in range(1, 1 + arguments.turns)]
    table = Table("first token of", "CPU ms, median (min)", "times as fast", title=f"{arguments.tokens} tokens")
    medians = {case: statistics.median([turn[case] for turn in turns]) for case in CASES}
    for case in CASES:
        least = min([turn[case] for turn in turns])
        table.add_row(case, f"{medians[case]:.2f} ({least:.2f})", f"{medians[CASES[0]] / medians[case]:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    with interruptible("benchmarks.host_tier"):
        main()
