"""The worker's side of the pipes: a line of JSON is a batch to generate, the answer is how long it took.

Needs nothing but the standard library: workers run in environments of other projects.
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

__all__ = ["Generate", "answer_asked", "model_config"]

# Prompts as token ids, and how many new tokens each gets.
Generate = Callable[[list[list[int]], int], None]


def model_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's own description."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def answer_asked(load: Callable[[Path, str], Generate]) -> None:
    """Be the program ``FOLDER DTYPE``: load, say so, and generate what is asked until the pipe is closed.

    Prompts come from the asked seed.
    """
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    vocabulary = model_config(folder)["vocab_size"]
    # What libraries print goes to the log: the pipe belongs to the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate = load(folder, dtype)
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        numbers = random.Random(asked["seed"])  # noqa: S311 - a workload, no secret
        prompts = [
            [numbers.randrange(vocabulary - 2) for _ in range(asked["prompt_tokens"])] for _ in range(asked["rows"])
        ]
        began = time.monotonic()
        generate(prompts, asked["new_tokens"])
        answers.write(json.dumps({"seconds": time.monotonic() - began}) + "\n")
