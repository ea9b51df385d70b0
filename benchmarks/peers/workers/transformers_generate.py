"""``transformers.generate`` over one static batch. Run: ``python -m ...transformers_generate FOLDER DTYPE``."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from benchmarks.peers.workers.pipes import Generate, serve_batches


def load(folder: Path, dtype: str) -> Generate:
    """Make a function that generates greedily, all rows at once."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )

    return generate


if __name__ == "__main__":
    serve_batches(load)
