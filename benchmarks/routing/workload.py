"""The requests of a simulation: conversations that grow, over system prompts of unequal popularity.

Owns what is asked and when; equal seeds give equal requests. Knows no replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

__all__ = ["CHUNK_TOKENS", "Conversation", "Workload", "conversations"]

CHUNK_TOKENS: Final = 256
# Chunk ids: those of a conversation are apart from those of all system prompts and of all other conversations.
_CHUNKS_A_CONVERSATION: Final = 256
_BATCH: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a run. Turns, tokens and pauses are geometric or exponential around their means."""

    system_prompts: int = 2000
    zipf: float = 1.1
    system_tokens: int = 1536
    turns: float = 5.0
    user_tokens: float = 256.0
    output_tokens: float = 160.0
    pause_s: float = 6.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation: its system prompt's chunks, and for each turn the new tokens, the answer's, the pause after it.

    ``first_chunk`` is the id of the first chunk that is its own.
    """

    begins_s: float
    system: tuple[int, ...]
    first_chunk: int
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    pauses_s: tuple[float, ...]

    def prompt_tokens(self, turn: int) -> int:
        """The tokens of a turn's prompt: all that was said so far."""
        said = sum(self.asked[: turn + 1]) + sum(self.answered[:turn])
        return len(self.system) * CHUNK_TOKENS + said

    def chain(self, tokens: int) -> tuple[int, ...]:
        """The full chunks of this conversation's first ``tokens`` tokens."""
        own = tokens // CHUNK_TOKENS - len(self.system)
        return self.system + tuple(range(self.first_chunk, self.first_chunk + own))


def conversations(workload: Workload, turns_a_second: float, seed: int) -> Iterator[Conversation]:
    """Conversations in order of their beginnings, without end, with ``turns_a_second`` turns a second on average."""
    draw = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, workload.system_prompts + 1) ** workload.zipf
    cumulative = np.cumsum(weights / weights.sum())
    chunks = np.maximum(1, draw.poisson(workload.system_tokens / CHUNK_TOKENS, workload.system_prompts))
    begins = np.concatenate(([0], np.cumsum(chunks)))
    systems = [tuple(range(int(begins[n]), int(begins[n + 1]))) for n in range(workload.system_prompts)]
    free_chunk, now = int(begins[-1]), 0.0
    while True:
        gaps = draw.exponential(workload.turns / turns_a_second, _BATCH)
        chosen = np.searchsorted(cumulative, draw.random(_BATCH)).clip(max=workload.system_prompts - 1)
        turns = draw.geometric(1 / workload.turns, _BATCH).clip(max=_CHUNKS_A_CONVERSATION // 8)
        ends = np.cumsum(turns)
        asked = draw.geometric(1 / workload.user_tokens, ends[-1]).clip(max=CHUNK_TOKENS * 4).tolist()
        answered = draw.geometric(1 / workload.output_tokens, ends[-1]).clip(max=CHUNK_TOKENS * 4).tolist()
        pauses = draw.exponential(workload.pause_s, ends[-1]).tolist()
        for number in range(_BATCH):
            now += float(gaps[number])
            end = int(ends[number])
            part = slice(end - int(turns[number]), end)
            yield Conversation(
                now, systems[chosen[number]], free_chunk, tuple(asked[part]), tuple(answered[part]), tuple(pauses[part])
            )
            free_chunk += _CHUNKS_A_CONVERSATION
