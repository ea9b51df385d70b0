"""One microbatch as tensors: token ids, positions, the slots that it writes, and what each query attends to.

Built once a forward from the plan and the page tables, then shared by every layer. Never looks at a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from engine.model.kv_pool import KVPool
from engine.plan import Segment

__all__ = ["AttentionGroup", "ForwardBatch"]


class AttentionGroup:
    """Rows that attend together: ``rows`` rows with ``queries`` tokens each, over ``slots`` of shape [rows, keys].

    A chunk of a prompt is a group of one row; neighbouring single-token segments (the decodes) are one group of many
    rows, padded to the longest.
    """

    def __init__(self, segments: Sequence[Segment], pool: KVPool, first_token: int, device: torch.device) -> None:
        self.rows = len(segments)
        self.queries = len(segments[0].token_ids)
        self.tokens = slice(first_token, first_token + self.rows * self.queries)
        lengths = np.array([segment.start + self.queries for segment in segments], np.int64)
        self.keys = int(lengths.max())
        slots = np.zeros((self.rows, self.keys), np.int64)
        for index, segment in enumerate(segments):
            slots[index, : lengths[index]] = pool.slots(segment.row, 0, int(lengths[index]))
        self.slots = torch.from_numpy(slots).to(device)
        self._lengths = torch.from_numpy(lengths).to(device)
        self._padded = bool((lengths != self.keys).any())
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """True where a query may look: bool [rows, queries, keys], or None where every query sees every key.

        A query at position p sees positions p - window + 1 .. p, all up to p without a window.
        """
        if window is not None and window >= self.keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if window is None and self.queries == 1 and not self._padded:
            return None
        device = self._lengths.device
        queries = self._lengths[:, None] - self.queries + torch.arange(self.queries, device=device)
        keys = torch.arange(self.keys, device=device)
        seen = keys <= queries[:, :, None]
        return seen if window is None else seen & (keys > queries[:, :, None] - window)


class ForwardBatch:
    """The tensors of one microbatch: ``token_ids`` and ``positions`` of shape [1, tokens], ``new_slots`` [tokens].

    ``emitting`` holds the indices of the tokens whose logits choose a next token, in the order of the segments.
    """

    def __init__(self, segments: Sequence[Segment], pool: KVPool, device: torch.device) -> None:
        self.segments = segments
        self.tokens = sum(len(segment.token_ids) for segment in segments)
        token_ids, positions, slots = self._arrays(pool)
        self.token_ids_array, self.positions_array, self.slots_array = token_ids, positions, slots
        self.token_ids = torch.from_numpy(token_ids)[None].to(device)
        self.positions = torch.from_numpy(positions)[None].to(device)
        self.new_slots = torch.from_numpy(slots).to(device)
        self.emitting = torch.tensor(list(self._emitting()), dtype=torch.int64, device=device)
        self.groups = list(self._groups(pool, device))

    @property
    def emitters(self) -> list[Segment]:
        """The segments that choose a token, in order."""
        return [segment for segment in self.segments if segment.emits]

    def _arrays(self, pool: KVPool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        token_ids = np.empty(self.tokens, np.int64)
        positions = np.empty(self.tokens, np.int64)
        slots = np.empty(self.tokens, np.int64)
        first = 0
        for segment in self.segments:
            count = len(segment.token_ids)
            stop = first + count
            token_ids[first:stop] = segment.token_ids
            positions[first:stop] = np.arange(segment.start, segment.start + count)
            slots[first:stop] = pool.slots(segment.row, segment.start, segment.start + count)
            first = stop
        return token_ids, positions, slots

    def _emitting(self) -> Iterator[int]:
        last = -1
        for segment in self.segments:
            last += len(segment.token_ids)
            if segment.emits:
                yield last

    def _groups(self, pool: KVPool, device: torch.device) -> Iterator[AttentionGroup]:
        first = 0
        for single, run in groupby(self.segments, key=lambda segment: len(segment.token_ids) == 1):
            members = list(run)
            for group in [members] if single else [[member] for member in members]:
                yield AttentionGroup(group, pool, first, device)
                first += sum(len(member.token_ids) for member in group)
