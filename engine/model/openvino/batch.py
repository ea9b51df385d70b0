"""One microbatch for OpenVINO's paged attention: tokens, positions and block tables; and the pool that they point into.

A page of ours is one block of OpenVINO's or several that follow each other. Built once a forward, from the page tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from engine.config import OPENVINO_BLOCK_TOKENS
from engine.limits import Limits
from engine.model.batch import emitters_of
from engine.model.kv_pool import KVPool, Slots
from engine.plan import Segment

__all__ = ["BlockBatch", "BlockPool", "block_names"]

# A port of the graph and what it is given.
_Arrays = dict[str, NDArray[Any]]

_BYTES_AS: Final = {torch.float32: (np.float32, ov.Type.f32), torch.bfloat16: (np.uint16, ov.Type.bf16)}


class BlockPool(KVPool):
    """The page tables of a stage, with its KV in OpenVINO's layout.

    ``caches`` has keys and values of each layer, each [blocks, kv heads, tokens of a block, head size].
    """

    def __init__(
        self,
        limits: Limits,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window_tokens: int = 0,
    ) -> None:
        super().__init__(
            limits,
            layers=0,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
            window_tokens=window_tokens,
        )
        self._blocks_a_page = self.page_size // OPENVINO_BLOCK_TOKENS
        shape = (self.total_slots // OPENVINO_BLOCK_TOKENS, kv_heads, OPENVINO_BLOCK_TOKENS, head_dim)
        numbers, kind = _BYTES_AS[dtype]
        # Zeros, as in every pool; the system gives the memory when it is first written. The tensors lie in the arrays.
        self._arrays = [(np.zeros(shape, numbers), np.zeros(shape, numbers)) for _ in range(layers)]
        self.caches = [
            (ov.Tensor(keys, ov.Shape(shape), kind), ov.Tensor(values, ov.Shape(shape), kind))
            for keys, values in self._arrays
        ]

    def block_table(self, rows: Slots, starts: Slots, counts: Slots) -> tuple[Slots, Slots, Slots, int]:
        """For rows that go on from ``starts`` with ``counts`` tokens: tokens before them, blocks, the blocks' begins,
        and the largest number of tokens that a row sees.

        A row of a window begins with the page of the first key that it sees.
        """
        if self.window_tokens:
            places = self.first_positions(starts) // self.page_size
            past = starts - places * self.page_size
            longest = int((past + counts).max())
            pages = self.pages_from(rows, places, -(-longest // self.page_size))
        else:
            past, longest = starts, int((starts + counts).max())
            pages = self.pages_of_rows(rows, longest)
        needed = -(-(past + counts) // OPENVINO_BLOCK_TOKENS)
        size = self._blocks_a_page
        blocks = pages if size == 1 else (pages[:, :, None] * size + np.arange(size)).reshape(len(rows), -1)
        used = blocks[np.arange(blocks.shape[1]) < needed[:, None]]
        return past, used, _begins(needed), longest


class BlockBatch:
    """See ``Batch``. ``arrays`` has what each input of the graph is given, the hidden states and caches excepted."""

    def __init__(self, segments: Sequence[Segment], pool: BlockPool) -> None:
        self.segments = segments
        ids = [token for segment in segments for token in segment.token_ids]
        self.tokens = len(ids)
        numbers = [(segment.row, segment.start, len(segment.token_ids), segment.choosers) for segment in segments]
        rows, starts, counts, choosers = np.array(numbers, np.int64).T.copy()
        begins = _begins(counts)
        self.token_ids_array = np.array(ids, np.int64)
        if self.tokens == len(segments):  # Decodes: a token a row.
            self.positions_array: Slots = starts
            self._slots = pool.slots_at(rows, starts)
        else:
            self.positions_array = np.arange(self.tokens) + np.repeat(starts - begins[:-1], counts)
            self._slots = pool.slots_at(np.repeat(rows, counts), self.positions_array)
        self.arrays: _Arrays = {
            "input_ids": self.token_ids_array,
            "position_ids": self.positions_array,
            "emitting": _last_of_each(begins[1:], choosers),
            "subsequence_begins": begins.astype(np.int32),
        }
        for windowed, own in ((False, pool), (True, pool.window)):
            if own is not None:
                assert isinstance(own, BlockPool), "the window pool of a block pool is one too"
                table = own.block_table(rows, starts, counts)
                values = [np.asarray(part, np.int32) for part in table]
                self.arrays.update(zip(block_names(windowed=windowed), values, strict=True))

    @property
    def slots_array(self) -> Slots:
        """The slots that are written."""
        return self._slots

    @property
    def emitters(self) -> list[Segment]:
        """See ``Batch``."""
        return emitters_of(self.segments)


def _begins(counts: Slots) -> Slots:
    """Where each of several runs begins, and the last one ends."""
    begins = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    return begins


def _last_of_each(ends: Slots, counts: Slots) -> Slots:
    """The last ``counts`` indices of runs with these ends, run after run."""
    before = _begins(counts)
    return np.arange(before[-1]) + np.repeat(ends - before[1:], counts)


def block_names(*, windowed: bool) -> tuple[str, str, str, str]:
    """The graph's inputs that say where the keys of one pool lie, in the order of ``BlockPool.block_table``."""
    prefix = "window_" if windowed else ""
    return (
        f"{prefix}past_lens",
        f"{prefix}block_indices",
        f"{prefix}block_indices_begins",
        f"{prefix}max_context_len",
    )
