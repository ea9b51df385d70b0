"""Generates the prompts of scripts and schedules from seeds, equal in every process."""

from __future__ import annotations

import functools
from typing import Final

import msgspec

# The most tokens of a prompt, or elements of another argument, that a script may ask for: more than any context. They
# are built before the route can refuse them.
MOST_ITEMS: Final = 1 << 20

# Prompts are printable ASCII, so that their text is one character a token with the embedded tokenizer.
_FIRST_PROMPT_ID: Final = 32
_PROMPT_IDS: Final = 95
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The seeds of a prompt: all tokens from ``seed``, or the first ``shared`` from it and the rest from ``tail``.

    With ``after`` it continues the request of that name: ``begun`` tokens, the first ``cut`` of its output included,
    come before those of the seeds.
    """

    seed: int
    shared: int = 0
    tail: int = 0
    after: str = ""
    cut: int | None = None
    begun: int = 0


def prompt_of(length: int, seed: int) -> list[int]:
    """Make ``length`` printable token ids that depend on seed and position; equal seeds give equal prefixes."""
    # A power of two: one cached stream serves all shorter prompts of its seed.
    return list(_stream_of(1 << max(length - 1, 0).bit_length(), seed)[:length])


@functools.lru_cache(maxsize=64)
def _stream_of(length: int, seed: int) -> tuple[int, ...]:
    value, ids = (seed + 1) * _MIX & _MASK, []
    for _ in range(length):
        value = (value * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & _MASK
        ids.append(_FIRST_PROMPT_ID + (value >> 33) % _PROMPT_IDS)
    return tuple(ids)


@functools.lru_cache(maxsize=4096)
def prompt_ids(length: int, seed: int, shared: int = 0, tail: int = 0) -> tuple[int, ...]:
    """Make ``length`` token ids; equal seeds give equal prefixes, as ``start_req(prompt_len=, prompt_seed=)`` does.

    The first ``shared`` come from ``seed`` and the others from ``tail``; with ``shared=0`` all come from ``seed``.
    """
    if not shared:
        return tuple(prompt_of(length, seed))
    return (*prompt_of(min(shared, length), seed), *prompt_of(max(0, length - shared), tail))
