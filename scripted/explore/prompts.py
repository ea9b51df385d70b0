"""The prompts and weights of schedules: the same as those of scripts; prompts are made once."""

from __future__ import annotations

import functools

from engine.config import EMBEDDED_MODEL
from scripted.verbs import prompt_of

__all__ = ["prompt_ids", "weights_of"]


@functools.lru_cache(maxsize=4096)
def prompt_ids(length: int, seed: int) -> tuple[int, ...]:
    """``length`` token ids; equal seeds give equal prefixes, as ``start_req(prompt_len=, prompt_seed=)`` does."""
    return tuple(prompt_of(length, seed))


def weights_of(seed: int) -> str:
    """The embedded model's weights of ``seed``, as an update names them."""
    return f"{EMBEDDED_MODEL}:{seed}"
