"""This engine without its server: scheduler, memory and model in one loop. Run: ``python -m ...own FOLDER DTYPE``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from benchmarks.one_process import Engine
from benchmarks.peers.workers.pipes import Generate, serve_batches
from engine.core.config import EngineConfig
from engine.model.backend import with_its_pages

KV_TOKENS: Final = 16_384


def load(folder: Path, dtype: str) -> Generate:
    """Make a function that generates greedily, batched by the scheduler."""
    # No front end or client needs a core here, and the other workers use all cores.
    threads = len(os.sched_getaffinity(0))
    values = {"model": str(folder), "dtype": dtype, "max_total_tokens": KV_TOKENS, "threads": threads}
    engine = Engine(with_its_pages(EngineConfig(**values)))

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        counts = {len(tokens) for tokens in engine.run(prompts, new_tokens).tokens.values()}
        if counts != {new_tokens}:
            raise RuntimeError(f"each request must give {new_tokens} tokens, got {counts}")

    return generate


if __name__ == "__main__":
    serve_batches(load)
