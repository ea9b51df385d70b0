"""The worker's end of the pipes: a line of JSON orders a batch, and the answer has its duration.

Needs only the standard library: workers run in environments of other projects.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Generate", "model_config", "serve_batches"]

# Prompts as token ids, and the number of new tokens of each.
Generate = Callable[[list[list[int]], int], None]


def model_config(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's configuration."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def serve_batches(load: Callable[[Path, str], Generate]) -> None:
    """Run the program ``FOLDER DTYPE``: load, report it, and generate batches until the pipe closes.

    Prompts are drawn from the order's seed.
    """
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    vocabulary = model_config(folder)["vocab_size"]
    # Libraries print to the log: the pipe is for answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate = load(folder, dtype)
    answers.write("{}\n")
    for line in sys.stdin:
        order = json.loads(line)
        numbers = random.Random(order["seed"])  # noqa: S311 - a workload, no secret
        prompts = [
            [numbers.randrange(vocabulary - 2) for _ in range(order["prompt_tokens"])] for _ in range(order["rows"])
        ]
        began = time.monotonic()
        generate(prompts, order["new_tokens"])
        answers.write(json.dumps({"seconds": time.monotonic() - began}) + "\n")
