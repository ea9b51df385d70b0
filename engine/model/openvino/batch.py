"""One microbatch for OpenVINO's paged attention: tokens, positions and block tables, and the pool of the blocks.

A page is one block of OpenVINO or several consecutive ones. Built for each forward pass, from the page tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray

from engine.core.config import OPENVINO_BLOCK_TOKENS
from engine.core.limits import Limits
from engine.core.plan import Segment
from engine.model.batch import BatchNumbers, begins_of
from engine.model.kv_pool import KVPool, Slots

# The graph's inputs, by port name.
_Arrays = dict[str, NDArray[Any]]

_KINDS: Final = {"f32": (np.float32, ov.Type.f32), "bf16": (np.uint16, ov.Type.bf16), "u8": (np.uint8, ov.Type.u8)}


class BlockFormat(NamedTuple):
    """OpenVINO's format of a layer's keys or values: its name of the element type, and the shape of one block.

    An 8-bit block has room for its scales and offsets.
    """

    kind: str
    shape: tuple[int, ...]

    def empty(self, blocks: int) -> tuple[NDArray[Any], ov.Tensor]:
        """Allocate zeroed blocks: an array, and the tensor that shares its memory.

        The system provides the memory at the first write.
        """
        numbers, kind = _KINDS[self.kind]
        array = np.zeros((blocks, *self.shape), numbers)
        return array, ov.Tensor(array, ov.Shape(array.shape), kind)


class BlockPool(KVPool):
    """The page tables of a stage, with its KV in OpenVINO's blocks.

    ``formats`` has the formats of keys and values for each layer of this pool; ``caches`` has the tensors.
    """

    def __init__(
        self, limits: Limits, formats: Sequence[tuple[BlockFormat, BlockFormat]], *, window_tokens: int = 0
    ) -> None:
        super().__init__(
            limits,
            layers=0,
            kv_heads=0,
            head_dim=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
            window_tokens=window_tokens,
        )
        self._blocks_a_page = self.page_size // OPENVINO_BLOCK_TOKENS
        blocks = self.total_slots // OPENVINO_BLOCK_TOKENS
        made = [(keys.empty(blocks), values.empty(blocks)) for keys, values in formats]
        # The tensors share the arrays' memory.
        self._arrays = [(keys[0], values[0]) for keys, values in made]
        self.caches = [(keys[1], values[1]) for keys, values in made]

    def page(self, number: int) -> Sequence[torch.Tensor]:
        """Return the blocks of one page as bytes, with the scales and offsets of 8-bit blocks."""
        blocks = slice(number * self._blocks_a_page, (number + 1) * self._blocks_a_page)
        return [torch.from_numpy(part[blocks].view(np.uint8)) for layer in self._arrays for part in layer]

    def block_table(self, rows: Slots, starts: Slots, counts: Slots) -> tuple[Slots, Slots, Slots, int]:
        """Build the block table of rows that compute ``counts`` tokens from ``starts``: the tokens before them, blocks,
        where each row's blocks begin, and the largest number of tokens that a row sees.

        With a window, a row's table begins with the page of the first key that it sees.
        """
        past, pages, longest = self.pages_seen(rows, starts, counts)
        needed = -(-(past + counts) // OPENVINO_BLOCK_TOKENS)
        size = self._blocks_a_page
        blocks = pages if size == 1 else (pages[:, :, None] * size + np.arange(size)).reshape(len(rows), -1)
        used = blocks[np.arange(blocks.shape[1]) < needed[:, None]]
        return past, used, begins_of(needed), longest


class BlockBatch:
    """A ``Batch`` for OpenVINO. ``arrays`` are the graph's inputs by name, except hidden states and caches.

    ``id_range`` has the smallest and the largest token id.
    """

    def __init__(self, segments: Sequence[Segment], pool: BlockPool) -> None:
        self.segments = segments
        self._pool = pool
        self._numbers = numbers = BatchNumbers(segments)
        self.token_ids_array, self.positions_array = numbers.token_ids, numbers.positions
        self.tokens = len(self.token_ids_array)
        self.id_range = int(self.token_ids_array.min()), int(self.token_ids_array.max())
        self.arrays: _Arrays = {
            "input_ids": self.token_ids_array,
            "position_ids": self.positions_array,
            "emitting": numbers.emitting,
            "subsequence_begins": numbers.begins.astype(np.int32),
        }
        # The number of steps that this batch has advanced since it was built.
        self._steps = 0
        self._first = [(segment.row, segment.start) for segment in segments]
        self._may_go_on = numbers.is_decodes and len(numbers.emitting) == len(segments) and pool.window is None
        self._look_up()

    def goes_on_with(self, segments: Sequence[Segment]) -> bool:
        """Become the next step's batch if it adds one token to each of the same rows. Returns whether it does.

        Call it only after the previous step's forward pass, because it overwrites the arrays.
        """
        if not self._may_go_on or len(segments) != len(self._first):
            return False
        step = self._steps + 1
        for segment, (row, start) in zip(segments, self._first, strict=True):
            if segment.row != row or segment.start != start + step or len(segment.token_ids) > 1 or not segment.emits:
                return False
        ids = [segment.token_ids[0] for segment in segments]
        self.segments, self.id_range, self._steps = segments, (min(ids), max(ids)), step
        self.token_ids_array[:] = ids
        self.positions_array += 1
        self._room -= 1
        if self._room < 0 or self._changes != self._pool.changes:
            self._look_up()
        else:
            self.slots_array += 1
            self.arrays["past_lens"] += 1
            self.arrays["max_context_len"] += 1
        return True

    def _look_up(self) -> None:
        """Look up slots and blocks in the page tables. For decodes ``starts`` is ``positions``, which advance."""
        pool, numbers = self._pool, self._numbers
        self.slots_array = numbers.slots_in(pool)
        for windowed, own in ((False, pool), (True, pool.window)):
            if own is not None:
                assert isinstance(own, BlockPool), "the window pool of a block pool is a block pool"
                table = own.block_table(numbers.rows, numbers.starts, numbers.counts)
                values = [np.array(part, np.int32) for part in table]
                self.arrays.update(zip(block_names(windowed=windowed), values, strict=True))
        # The number of steps for which each row stays in its last block. Set last, so that a failed lookup is repeated.
        self._room = OPENVINO_BLOCK_TOKENS - 1 - int((numbers.starts % OPENVINO_BLOCK_TOKENS).max())
        self._changes = pool.changes


def block_names(*, windowed: bool) -> tuple[str, str, str, str]:
    """Name the graph's inputs for one pool's block table, in the order of ``BlockPool.block_table``."""
    prefix = "window_" if windowed else ""
    return (f"{prefix}past_lens", f"{prefix}block_indices", f"{prefix}block_indices_begins", f"{prefix}max_context_len")
