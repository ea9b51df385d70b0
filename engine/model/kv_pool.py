"""The KV pool of one stage: the pages of keys and values, and the page table of every row.

Maps a position to its slot; the scheduler's plan decides which pages a request gets. Attention writes the pool in every
forward pass.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from engine.core.errors import StepFailedError
from engine.core.limits import Limits
from engine.core.plan import Segment

Slots = NDArray[np.int64]


class KVPool:
    """Keys and values of shape [layers of the stage, kv heads, pages * page_size, head size].

    Heads come first, so that a row's keys of one head are contiguous after gathering: for 32 rows of 160 tokens
    attention took half as long as over interleaved heads. With ``pages_first`` the shape is [layers of the stage, pages
    * page_size, kv heads, head size], as kernels that follow page tables require. A slot is the place of one token:
    ``page * page_size + offset``.

    ``window`` is the pool of the stage's window layers, with its own page tables; None for a model without them. With
    ``window_tokens`` this pool is a window pool itself: it holds only the last tokens of a row. ``changes`` grows with
    each segment that adds pages. With ``scratch`` it has a page after the last one that no plan can name, for padding
    rows.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        pages_first: bool = False,
        window_tokens: int = 0,
        scratch: bool = False,
    ) -> None:
        self.page_size = limits.page_size
        self.window_tokens = window_tokens
        self.window: KVPool | None = None
        self.total_slots = (limits.window_pages if window_tokens else limits.total_pages) * limits.page_size
        self.pages_first = pages_first
        self.scratch_page = self.total_slots // limits.page_size if scratch else None
        slots = self.total_slots + (limits.page_size if scratch else 0)
        places = (slots, kv_heads) if pages_first else (kv_heads, slots)
        shape = (layers, *places, head_dim)
        # Zeros, not uninitialized memory: padding gathers slots that were never written, and a NaN there would survive
        # the mask.
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        # Counts the writes of page tables.
        self.changes = 0
        self._tables = np.zeros((limits.rows, limits.pages_for(limits.context_length)), np.int64)
        self._offsets = np.arange(self.page_size, dtype=np.int64)

    @property
    def rows(self) -> int:
        return self._tables.shape[0]

    @property
    def row_places(self) -> int:
        return self._tables.shape[1]

    def adopt(self, segment: Segment) -> None:
        """Write the pages that a segment adds into its row's page table, and into that of the window layers.

        Raises StepFailedError for a row, a place or a page that does not exist, before any write.
        """
        if not segment.pages:
            return
        stop = segment.page_start + len(segment.pages)
        self._require("row", (segment.row,), self._tables.shape[0])
        self._require("places of pages", (segment.page_start, stop - 1), self._tables.shape[1])
        self._require("pages", segment.pages, self.total_slots // self.page_size)
        if self.window is not None:
            self.window.adopt_window(segment)
        self._tables[segment.row, segment.page_start : stop] = segment.pages
        self.changes += 1

    def adopt_window(self, segment: Segment) -> None:
        """Do the same for the pool of the window layers; a row never reads where it has no window page."""
        if len(segment.window_pages) != len(segment.pages):
            raise StepFailedError(
                f"a segment must have as many window pages as pages, {len(segment.pages)}, got "
                f"{segment.window_pages}; the plan is broken"
            )
        pages = [max(0, page) for page in segment.window_pages]
        self._require("window pages", tuple(pages), self.total_slots // self.page_size)
        self._tables[segment.row, segment.page_start : segment.page_start + len(pages)] = pages

    def first_positions(self, starts: Slots) -> Slots:
        """Return the first position that a row's layers see when its queries begin at ``starts``."""
        return np.maximum(0, starts - self.window_tokens + 1) if self.window_tokens else np.zeros_like(starts)

    def slots_from(self, rows: Slots, firsts: Slots, lengths: Slots) -> Slots:
        """Return the slots [rows, keys] of ``lengths`` positions from each row's first; shorter rows repeat their last
        slot.
        """
        positions = firsts[:, None] + np.minimum(np.arange(int(lengths.max())), lengths[:, None] - 1)
        self._require("places of pages", (int(positions.max()) // self.page_size,), self._tables.shape[1])
        pages = self._tables[rows[:, None], positions // self.page_size]
        slots: Slots = pages * self.page_size + positions % self.page_size
        return slots

    def pages_seen(self, rows: Slots, starts: Slots, counts: Slots) -> tuple[Slots, Slots, int]:
        """Return, for ``counts`` new tokens at ``starts``: tokens before them, pages [rows, places], longest context.

        A row of a window begins with the page of the first key that it attends to. Entries beyond a row's pages are
        stale.
        """
        if not self.window_tokens:
            longest = int((starts + counts).max())
            return starts, self.pages_of_rows(rows, longest), longest
        places = self.first_positions(starts) // self.page_size
        before = starts - places * self.page_size
        longest = int((before + counts).max())
        columns = places[:, None] + np.arange(-(-longest // self.page_size))
        return before, self._tables[rows[:, None], np.minimum(columns, self._tables.shape[1] - 1)], longest

    def slots(self, row: int, start: int, stop: int) -> Slots:
        """Return the slots of positions ``start .. stop - 1`` of a row."""
        size = self.page_size
        first = start // size
        pages = self._tables[row, first : -(-stop // size)]
        every = (pages[:, None] * size + self._offsets).ravel()
        return every[start - first * size : stop - first * size]

    def slots_at(self, rows: Slots, positions: Slots) -> Slots:
        """Return the slot of one position of each row. Raises StepFailedError for positions outside the page tables."""
        places = positions // self.page_size
        self._require("places of pages", (int(places.max()),), self._tables.shape[1])
        slots: Slots = self._tables[rows, places] * self.page_size + positions % self.page_size
        return slots

    def slots_of_rows(self, rows: Slots, count: int) -> Slots:
        """Return the slots [rows, count] of positions ``0 .. count - 1`` of several rows; stale beyond a row's pages.

        Raises StepFailedError for positions outside the page tables.
        """
        pages = self.pages_of_rows(rows, count) * self.page_size
        return (pages[:, :, None] + self._offsets).reshape(len(rows), -1)[:, :count]

    def pages_of_rows(self, rows: Slots, count: int) -> Slots:
        """Return the pages [rows, places] of positions ``0 .. count - 1`` of rows; stale beyond a row's pages."""
        places = -(-count // self.page_size)
        self._require("places of pages", (places - 1,), self._tables.shape[1])
        pages: Slots = self._tables[rows, :places]
        return pages

    def page(self, number: int) -> Sequence[torch.Tensor]:
        """Return the KV of one page, as views of the pool."""
        slots = slice(number * self.page_size, (number + 1) * self.page_size)
        return [part[:, slots] if self.pages_first else part[:, :, slots] for part in (self.keys, self.values)]

    @staticmethod
    def _require(what: str, values: tuple[int, ...], count: int) -> None:
        if min(values) < 0 or max(values) >= count:
            raise StepFailedError(f"{what} of a segment must be in 0..{count - 1}, got {values}; the plan is broken")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; a CPU commits memory only for pages that are written.

    ``torch.zeros`` writes all of it at once: the pool of a small model took ten GiB before its first request. With huge
    pages, which numpy requests, the first token of a model of 28 layers with 8 heads took 0.9 GiB, one page for each
    head. Raises MemoryError for more memory than is available: the process would be killed once the pool is full.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    if size > (available := psutil.virtual_memory().available):
        raise MemoryError(f"{size} bytes are needed, {available} are available")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
