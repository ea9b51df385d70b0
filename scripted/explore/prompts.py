"""The prompts of schedules: the same as those of scripts, made once."""

from __future__ import annotations

import functools

from scripted.verbs import prompt_of

__all__ = ["prompt_ids"]


@functools.lru_cache(maxsize=4096)
def prompt_ids(length: int, seed: int) -> tuple[int, ...]:
    """``length`` token ids; equal seeds give equal prefixes, as ``start_req(prompt_len=, prompt_seed=)`` does."""
    return tuple(prompt_of(length, seed))
