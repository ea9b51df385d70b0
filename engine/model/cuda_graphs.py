"""Decode batches as CUDA graphs: captured for a few sizes at startup, then replayed with one call per step.

Owns the graphs' input buffers and the choice of a size, to which a batch is padded with rows of the scratch page, which
belongs to no request. The recorder is a parameter, so that everything but the capture runs without a GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from engine.core.plan import Segment
from engine.model.batch import DecodeBatch, LayersBatch, LayersView, PageTable, require_hidden
from engine.model.kv_pool import KVPool
from engine.model.transfer import sent

# A function that runs the layers over tensors at fixed addresses. The next run overwrites its result.
Compute = Callable[[], torch.Tensor]
# A function that captures a computation and returns a function that replays it over the same tensors.
Recorder = Callable[[Compute], Compute]
# A function that computes the layers of a stage for a batch and, except on the first stage, hidden states.
Layers = Callable[[LayersBatch, torch.Tensor | None], torch.Tensor]

# In larger batches the cost of a kernel launch is negligible.
LARGEST_SIZE: Final = 512
# In the first runs libraries choose algorithms and allocate workspaces, which must not be captured.
_RUNS_BEFORE: Final = 2
# The arrays of a DecodeBatch that are copied unchanged: ids, positions, slots. The lengths follow them.
_COPIED: Final = 3


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: the powers of two below ``most``, and ``most`` itself."""
    return (*[1 << power for power in range((most - 1).bit_length())], most)


def why_no_graphs(device: torch.device, pool: KVPool, *, lean: bool) -> str | None:
    """Return why no decode of a stage can be captured; None if plain batches can.

    A decode can be captured if it never waits for the GPU and its shapes depend only on the batch's size.
    """
    if device.type != "cuda":
        return f"the device is {device}, and graphs need CUDA"
    if not lean:
        return "transformers' own forward pass computes, which may read numbers from the GPU"
    if not pool.pages_first:
        return "attention gathers its keys, so its shapes depend on the context; see attention_backend"
    if pool.window is not None:
        return "the model has window layers"
    return None


class DecodeGraphs:
    """The captured decodes of one stage over one pool. Capturing computes only in the scratch page.

    ``hidden_size`` is the size of the stage's incoming hidden states, 0 on the first stage. With ``loras``, a batch
    with a LoRA is computed eagerly. Propagates the exceptions of ``record``.
    """

    def __init__(
        self,
        layers: Layers,
        pool: KVPool,
        *,
        device: torch.device,
        dtype: torch.dtype,
        hidden_size: int = 0,
        loras: bool = False,
        record: Recorder,
    ) -> None:
        self._pool, self._device, self._loras = pool, device, loras
        self.sizes = graph_sizes(min(pool.rows, LARGEST_SIZE))
        self._buffers = _Buffers(pool, self.sizes[-1], device, dtype, hidden_size)
        self._replays: dict[int, Compute] = {}
        # The largest graph first: the others reuse the memory of its intermediate results.
        for size in reversed(self.sizes):
            batch, hidden = self._buffers.batch(size), self._buffers.hidden_of(size)
            self._replays[size] = record(partial(layers, batch, hidden))

    def batch(self, segments: Sequence[Segment]) -> DecodeBatch | None:
        """Return the padded batch of these segments; None if the eager forward pass must compute them.

        Graphs exist for decodes of one token each, but not for chunks of prompts, drafts, prompt logprobs or LoRAs.
        """
        if len(segments) > self.sizes[-1] or not all(map(self._is_plain, segments)):
            return None
        return DecodeBatch(segments, self._pool, self.sizes[bisect.bisect_left(self.sizes, len(segments))])

    def forward(self, batch: DecodeBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute a batch: [its tokens, ...]. The next call overwrites the result."""
        self._buffers.fill(batch, hidden)
        return self._replays[batch.size]()[: batch.tokens]

    def _is_plain(self, segment: Segment) -> bool:
        return (
            len(segment.token_ids) == 1
            and segment.emits
            and segment.logprobs_from < 0
            and not (self._loras and segment.lora)
        )


class _Buffers:
    """The inputs of all graphs, each of which reads the first rows of the same tensors."""

    def __init__(self, pool: KVPool, most: int, device: torch.device, dtype: torch.dtype, hidden_size: int) -> None:
        assert pool.scratch_page is not None, "graphs need a pool with a scratch page"
        self._device = device
        # Ids, positions and slots, as in a DecodeBatch. Until the first batch all rows are padding.
        self._numbers = torch.zeros((_COPIED, most), dtype=torch.int64, device=device)
        self._numbers[2] = pool.scratch_page * pool.page_size
        # Kernels that follow page tables take 32-bit numbers.
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._pages = torch.full((most, pool.row_places), pool.scratch_page, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)
        self._last_position = pool.row_places * pool.page_size - 1
        self._hidden = torch.zeros((most, hidden_size), dtype=dtype, device=device) if hidden_size else None

    def batch(self, size: int) -> LayersBatch:
        most_keys = self._last_position + 1
        table = PageTable(self._starts[: size + 1], self._lengths[:size], self._pages[:size], 1, most_keys)
        token_ids, positions, slots = self._numbers[:, :size]
        # Prompt logprobs and LoRAs, which need segments, are computed eagerly.
        emitting, view = self._rows[:size], LayersView(slots, table)
        return LayersBatch(size, token_ids[None], positions[None], emitting, self._last_position, view)

    def hidden_of(self, size: int) -> torch.Tensor | None:
        return None if self._hidden is None else self._hidden[:size]

    def fill(self, batch: DecodeBatch, hidden: torch.Tensor | None) -> None:
        """Copy a batch to the inputs of its graph: one copy from the host, then one for each array."""
        numbers, pages = sent([batch.numbers_array, batch.pages_array], self._device)
        self._numbers[:, : batch.size].copy_(numbers[:_COPIED])
        if batch.ahead is not None:
            batch.ahead.fill(self._numbers[0])
        self._lengths[: batch.size].copy_(numbers[_COPIED])
        self._pages[: batch.size, : pages.shape[1]].copy_(pages)
        if self._hidden is None:
            return
        self._hidden[: batch.tokens].copy_(require_hidden(hidden, batch.tokens, self._hidden.shape[1]))


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs on a device, with one shared memory pool for intermediate results."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        with torch.cuda.device(device):
            aside = torch.cuda.Stream(device)
            aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(aside):
                for _ in range(_RUNS_BEFORE):
                    compute()
            torch.cuda.current_stream(device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record
