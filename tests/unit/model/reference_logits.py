"""Reference logits of two sequences from transformers itself, computed once for each family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

Reference = Callable[[str], tuple[torch.Tensor, list[torch.Tensor]]]


def reference_logits(checkpoint_of: Callable[[str], Path], tokens: int) -> Reference:
    """Return, by family, the ids of two sequences of ``tokens`` tokens, and the fp32 logits of each by position."""

    @functools.cache
    def compute(family: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint_of(family), attn_implementation="eager", dtype=torch.float32
        )
        ids = torch.randint(0, 198, (2, tokens), generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            return ids, [model(row[None]).logits[0] for row in ids]

    return compute
