"""How long the first token of a prompt takes: computed, loaded from the host, or hit in the prefix cache, on a CPU.

Scheduler and model in one process; the three take turns, each with a prompt of its own. CPU time is shown: on a busy
machine wall time is that of the others. Run: ``python -m benchmarks.host_tier``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import make_checkpoint, vocabulary_of
from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import EvictCache, Generate, SamplingParams
from engine.model.checkpoint import read_configured_facts
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.scheduler import Scheduler
from lockstep.interruption import interruptible

CASES: Final = ("computed", "from the host", "prefix cache")
PAGE_TOKENS: Final = 32


class HostTierBench:
    """One engine, and requests for one token each."""

    def __init__(self, folder: Path, tokens: int, vocabulary: int) -> None:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            backend="torch",
            page_size=PAGE_TOKENS,
            chunked_prefill_size=tokens,
            max_total_tokens=8 * tokens,
            host_kv_tokens=8 * tokens,
        )
        limits = Limits.of(config, read_configured_facts(config))
        self._scheduler = Scheduler(limits)
        self._pipeline = LocalPipeline(StageRunner(config, limits, 0))
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._asked = 0

    def first_token(self, seed: int) -> tuple[float, int]:
        """Milliseconds of CPU until a prompt's first token, and how many of its tokens were cached."""
        ids = tuple(
            (seed * 7919 + place * place * 31 + place) % (self._vocabulary - 1) for place in range(self._tokens)
        )
        self._asked += 1
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        message = Generate(rid=f"r{self._asked}", prompt_ids=ids, sampling=sampling)
        cached, start = self._scheduler.counters.cached_tokens, time.process_time()
        result = self._scheduler.step([message], 0.0)
        while not self._scheduler.is_fully_idle:
            assert result.microbatch is not None, "a request of one prompt is computed at once"
            self._pipeline.launch(result.microbatch)
            completion = self._pipeline.next_completion(None)
            assert completion is not None
            result = self._scheduler.step([completion], 0.0)
        spent = time.process_time() - start
        return spent * 1e3, self._scheduler.counters.cached_tokens - cached

    def turn(self, number: int) -> dict[str, float]:
        """Each case once, with prompts that no other turn has."""
        times: dict[str, float] = {}
        prompt, filler = 2 * number, 2 * number + 1
        times[CASES[0]], none = self.first_token(prompt)
        times[CASES[2]], hit = self.first_token(prompt)
        self._scheduler.step([EvictCache()], 0.0)
        # Its microbatch carries the pages to the host.
        self.first_token(filler)
        times[CASES[1]], loaded = self.first_token(prompt)
        assert (none, hit) == (0, loaded), f"cached were {none}, {hit} and {loaded} tokens"
        return times


def main() -> None:
    """Print each case's median and minimum, and how many times faster than computing it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--shape", choices=("S", "M"), default="S")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), arguments.dtype, arguments.shape)
        bench = HostTierBench(Path(name), arguments.tokens, vocabulary_of(arguments.shape))
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
