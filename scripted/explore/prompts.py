"""The prompts and weights of schedules: the same as those of scripts; prompts are made once."""

from __future__ import annotations

import functools

from engine.config import EMBEDDED_MODEL
from scripted.explore.actions import StartRequest
from scripted.verbs import prompt_of

__all__ = ["prompt_ids", "prompt_of_start", "weights_of"]


@functools.lru_cache(maxsize=4096)
def prompt_ids(length: int, seed: int, shared: int = 0, tail: int = 0) -> tuple[int, ...]:
    """``length`` token ids; equal seeds give equal prefixes, as ``start_req(prompt_len=, prompt_seed=)`` does.

    With ``shared`` only so many of them are those of ``seed``, the others are those of ``tail``.
    """
    if not shared:
        return tuple(prompt_of(length, seed))
    return (*prompt_of(min(shared, length), seed), *prompt_of(max(0, length - shared), tail))


def prompt_of_start(start: StartRequest) -> tuple[int, ...]:
    """The prompt of a schedule's request."""
    return prompt_ids(start.prompt, start.seed, start.shared, start.tail)


def weights_of(seed: int) -> str:
    """The embedded model's weights of ``seed``, as an update names them."""
    return f"{EMBEDDED_MODEL}:{seed}"
