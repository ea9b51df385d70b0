"""One microbatch as tensors: token ids, positions, slots to write, and the keys of each query.

Built once per forward pass from the plan and the page tables, then shared by every layer. Never reads a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from engine.core.errors import StepFailedError
from engine.core.plan import Segment
from engine.model.kv_pool import KVPool, Slots
from engine.model.newest_tokens import AheadIds
from engine.model.transfer import sent


class Batch(Protocol):
    """The common part of every backend's batch: the plan's segments, and the slots of their tokens in order."""

    segments: Sequence[Segment]
    tokens: int
    token_ids_array: Slots
    positions_array: Slots
    slots_array: Slots


class BatchNumbers:
    """The segments of a batch as arrays: rows, starts, token counts, and the index of each segment's first token.

    For all tokens, in order: ids, positions, and the indices of the tokens whose logits choose a next token
    (``emitting``). With ``is_decodes`` each segment has one token.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        counts = [len(segment.token_ids) for segment in segments]
        ids = [token for segment in segments for token in segment.token_ids]
        self.rows: Slots = np.array([segment.row for segment in segments], np.int64)
        self.starts: Slots = np.array([segment.start for segment in segments], np.int64)
        self.counts: Slots = np.array(counts, np.int64)
        self.token_ids: Slots = np.array(ids, np.int64)
        self.is_decodes = len(ids) == len(segments)
        if self.is_decodes:
            emitting = [place for place, segment in enumerate(segments) if segment.emits]
            self.begins: Slots = np.arange(len(ids) + 1)
            self.positions = self.starts
        else:
            ends = zip(segments, itertools.accumulate(counts), strict=True)
            emitting = [place for segment, end in ends for place in range(end - segment.choosers, end)]
            self.begins = begins_of(self.counts)
            self.positions = np.arange(len(ids)) + np.repeat(self.starts - self.begins[:-1], self.counts)
        self.emitting: Slots = np.array(emitting, np.int64)

    def slots_in(self, pool: KVPool) -> Slots:
        """Return the slot that each token is written to."""
        return pool.slots_at(self.rows if self.is_decodes else np.repeat(self.rows, self.counts), self.positions)


class AttentionGroup:
    """Rows that attend together: ``rows`` rows with ``queries`` tokens each, over ``keys`` keys a row.

    A chunk of a prompt is a group of one row; consecutive decodes with equal numbers of drafts are one group of many
    rows, padded to the longest. Over a pool of window layers the keys begin with the first one that the first query
    sees.
    """

    def __init__(self, numbers: BatchNumbers, part: slice, pool: KVPool, device: torch.device) -> None:
        rows, starts = numbers.rows[part], numbers.starts[part]
        self.rows, self.queries = len(rows), int(numbers.counts[part.start])
        first_token = int(numbers.begins[part.start])
        self.tokens = slice(first_token, first_token + self.rows * self.queries)
        firsts = pool.first_positions(starts)
        lengths = starts + self.queries - firsts
        self.keys = int(lengths.max())
        slots = pool.slots_from(rows, firsts, lengths) if pool.window_tokens else pool.slots_of_rows(rows, self.keys)
        self.run = _run_of(slots)
        self._slots_array, self._lengths_array, self._device = slots, lengths, device
        self._padded = bool((lengths != self.keys).any())
        self._masks: dict[int | None, torch.Tensor | None] = {}

    @cached_property
    def slots(self) -> torch.Tensor:
        """The keys' slots [rows * keys], row after row, for a backend that gathers."""
        return sent([self._slots_array.ravel()], self._device)[0]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """The number of keys of each row, [rows]."""
        return sent([self._lengths_array], self._device)[0]

    def causal(self, window: int | None) -> bool:
        """True if query n and key n have the same position, and a query sees all keys up to its own."""
        return 1 < self.queries == self.keys and (window is None or window >= self.keys)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask to add to scores: 0 where a query may look, else -inf; None if every query sees every key.

        Of shape [1, rows, queries, keys]. A query at position p sees positions p - window + 1 .. p, all up to p without
        a window.
        """
        if window is not None and window >= self.keys:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, dtype)
        return self._masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        if window is None and self.queries == 1 and not self._padded:
            return None
        device = self.lengths.device
        queries = self.lengths[:, None] - self.queries + torch.arange(self.queries, device=device)
        keys = torch.arange(self.keys, device=device)
        hidden = keys > queries[:, :, None]
        if window is not None:
            hidden |= keys <= queries[:, :, None] - window
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[None]


class PageTable(NamedTuple):
    """Arguments of a kernel that follows page tables, one row per segment, as int32.

    ``starts`` [rows + 1] are the first queries of the segments and the end, ``lengths`` [rows] the number of keys of
    each, ``pages`` [rows, places] the pages of these keys.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    most_queries: int
    most_keys: int


class LayersView(NamedTuple):
    """A batch's view of one pool: the slots [tokens] that it writes, and the places of its keys.

    A kernel that follows page tables reads ``table``; every other attention reads ``groups``, the rows that attend
    together.
    """

    new_slots: torch.Tensor
    table: PageTable | None = None
    groups: Sequence[AttentionGroup] = ()


class LayersBatch(NamedTuple):
    """A batch for torch's layers: ``token_ids`` and ``positions`` have the shape [1, tokens].

    ``emitting`` holds the indices of the tokens whose logits choose a next token, in the order of the segments.
    ``last_position`` bounds the positions of all tokens. ``full`` is the view of the layers that see everything,
    ``window`` the view of the window layers, if any. Without ``segments`` no token needs prompt logprobs or a LoRA.
    """

    tokens: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    emitting: torch.Tensor
    last_position: int
    full: LayersView
    window: LayersView | None = None
    segments: Sequence[Segment] = ()


class _Places:
    """The places of a batch's tokens and keys in one pool: ``arrays`` go to the device.

    A pool that keeps its pages first has a table and no groups: groups list the slots of all keys, which is most of the
    work for a long context, and the kernel does not need them.
    """

    def __init__(self, numbers: BatchNumbers, segments: Sequence[Segment], pool: KVPool, device: torch.device) -> None:
        self.slots_array = numbers.slots_in(pool)
        self.arrays = [self.slots_array]
        self._groups: list[AttentionGroup] = []
        if pool.pages_first:
            before, pages, self._most_keys = pool.pages_seen(numbers.rows, numbers.starts, numbers.counts)
            self._most_queries = int(numbers.counts.max())
            self.arrays += [numbers.begins, before + numbers.counts, pages]
        else:
            self._groups = list(_groups(segments, numbers, pool, device))

    def view(self, sent_arrays: Sequence[torch.Tensor]) -> LayersView:
        """Return the view with its ``arrays`` on the device."""
        new_slots, *rest = sent_arrays
        if not rest:
            return LayersView(new_slots, groups=self._groups)
        starts, lengths, pages = [tensor.to(torch.int32) for tensor in rest]
        return LayersView(new_slots, PageTable(starts, lengths, pages, self._most_queries, self._most_keys))


class ForwardBatch:
    """One microbatch as numbers, and as the tensors ``layers``."""

    def __init__(self, segments: Sequence[Segment], pool: KVPool, device: torch.device) -> None:
        self.segments = segments
        self.tokens = sum([len(segment.token_ids) for segment in segments])
        numbers = BatchNumbers(segments)
        full = _Places(numbers, segments, pool, device)
        window = None if pool.window is None else _Places(numbers, segments, pool.window, device)
        self.token_ids_array, self.positions_array = numbers.token_ids, numbers.positions
        self.slots_array = full.slots_array
        others = [] if window is None else window.arrays
        arrays = [self.token_ids_array, self.positions_array, numbers.emitting, *full.arrays, *others]
        token_ids, positions, emitting, *rest = sent(arrays, device)
        self.layers = LayersBatch(
            self.tokens,
            token_ids[None],
            positions[None],
            emitting,
            int(self.positions_array.max()),
            full.view(rest[: len(full.arrays)]),
            None if window is None else window.view(rest[len(full.arrays) :]),
            segments,
        )

    def take_ahead(self, ahead: AheadIds) -> None:
        ahead.fill(self.layers.token_ids[0])


class DecodeBatch:
    """One token of each of several rows as arrays on the host, padded to ``size`` rows.

    Padding rows are at position 0 of the scratch page of a pool that keeps its pages first.
    """

    def __init__(self, segments: Sequence[Segment], pool: KVPool, size: int) -> None:
        assert pool.scratch_page is not None, "a padded batch needs a pool with a scratch page"
        self.segments = segments
        self.tokens, self.size = len(segments), size
        rows = np.array([segment.row for segment in segments], np.int64)
        self.token_ids_array = np.array([segment.token_ids[0] for segment in segments], np.int64)
        self.positions_array = np.array([segment.start for segment in segments], np.int64)
        self.slots_array = pool.slots_at(rows, self.positions_array)
        pages = pool.pages_of_rows(rows, int(self.positions_array.max()) + 1)
        # Ids, positions, slots and lengths of all rows, in one block, for one copy.
        self.numbers_array = np.zeros((4, size), np.int64)
        lines = self.token_ids_array, self.positions_array, self.slots_array, self.positions_array + 1
        for line, values in zip(self.numbers_array, lines, strict=True):
            line[: self.tokens] = values
        self.numbers_array[2, self.tokens :] = pool.scratch_page * pool.page_size
        self.numbers_array[3, self.tokens :] = 1
        self.pages_array = np.full((size, pages.shape[1]), pool.scratch_page, np.int64)
        self.pages_array[: self.tokens] = pages
        # The ids that exist only on the device.
        self.ahead: AheadIds | None = None

    def take_ahead(self, ahead: AheadIds) -> None:
        self.ahead = ahead


def require_hidden(hidden: torch.Tensor | None, tokens: int, hidden_size: int) -> torch.Tensor:
    """Return the previous stage's hidden states. Raises StepFailedError for a wrong shape, or without any."""
    shape = (tokens, hidden_size)
    found = None if hidden is None else tuple(hidden.shape)
    if hidden is None or found != shape:
        raise StepFailedError(f"hidden states from the previous stage must have shape {shape}, got {found}")
    return hidden


def emitters_of(segments: Sequence[Segment]) -> list[Segment]:
    """Return a segment for each token to choose, ending with the token whose logits choose it: drafts give several."""
    emitters: list[Segment] = []
    for segment in segments:
        if segment.drafts:
            emitters += _parts(segment)
        elif segment.emits:
            emitters.append(segment)
    return emitters


def _parts(segment: Segment) -> Iterator[Segment]:
    tokens = len(segment.token_ids)
    for end in range(tokens - segment.drafts, tokens + 1):
        yield msgspec.structs.replace(segment, token_ids=segment.token_ids[:end], drafts=0)


def _groups(
    segments: Sequence[Segment], numbers: BatchNumbers, pool: KVPool, device: torch.device
) -> Iterator[AttentionGroup]:
    first = 0
    for queries, run in itertools.groupby(segments, key=_queries_of_a_decode):
        members = len(list(run))
        for rows in [members] if queries else [1] * members:
            yield AttentionGroup(numbers, slice(first, first + rows), pool, device)
            first += rows


def _queries_of_a_decode(segment: Segment) -> int:
    """Return a decode's number of tokens, 0 for a chunk of a prompt; neighbours with equal numbers attend together."""
    tokens = len(segment.token_ids)
    return tokens if tokens == 1 or segment.drafts else 0


def begins_of(counts: Slots) -> Slots:
    """Return the start of each run, and the end of the last one."""
    begins = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins


def _run_of(slots: Slots) -> slice | None:
    """Return the slots of a single row as a slice if its pages are contiguous: such keys need no gathering."""
    if len(slots) > 1 or (np.diff(slots[0]) != 1).any():
        return None
    return slice(int(slots[0, 0]), int(slots[0, -1]) + 1)
