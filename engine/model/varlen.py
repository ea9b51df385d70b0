"""Paged attention as one kernel call a layer, for CUDA: torch's variable-length attention over the page tables.

Replaces gathering keys and values unless ``why_not_varlen`` has a reason against it; that runs once at a stage's start
and tries the kernel on the device. Never used on a CPU, for which torch has no such kernel.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from engine.core.errors import StepFailedError
from engine.model.attention import PagedAttention, Scoring
from engine.model.batch import PageTable

_DTYPES: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8
_OLDEST_CAPABILITY: Final = (8, 0)

# The probe's sequence is slightly longer than two pages, with a window that ends inside it.
_PROBE_PAGES: Final = 3
_PROBE_WINDOW: Final = 3
# Both round to 16 bits at different places; a mask that is off by one key changes the output by more than 0.1.
_PROBE_TOLERANCE: Final = 0.03


class AttentionShape(NamedTuple):
    """The properties of a model's attention that the kernel depends on."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    softcap: float | None = None


class VarlenAttention(PagedAttention):
    """Attends over a pool that keeps pages first, without gathering."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See ``PagedAttention``. Raises StepFailedError for a model that caps its scores."""
        if scoring.softcap is not None:
            raise StepFailedError("attention_backend='varlen' cannot cap scores, which this model does; use 'sdpa'")
        batch = self._stage.enter(windowed=self._windowed, window=scoring.window)
        table = batch.table
        assert table is not None, "a batch over a pool with pages first has a page table"
        self._keys.index_copy_(0, batch.new_slots, key.to(self._keys.dtype))
        self._values.index_copy_(0, batch.new_slots, value.to(self._values.dtype))
        pages = (-1, self._stage.pool.page_size, *self._keys.shape[1:])
        attended = _attend(query.to(self._keys.dtype), self._keys.view(pages), self._values.view(pages), table, scoring)
        return attended.to(query.dtype)


def why_not_varlen(device: torch.device, shape: AttentionShape) -> str | None:
    """Return why attention must gather its keys; None if the kernel computes this shape on this device."""
    if device.type != "cuda":
        return f"the device is {device}, and the kernel needs CUDA"
    if (capability := torch.cuda.get_device_capability(device)) < _OLDEST_CAPABILITY:
        return f"the device has compute capability {capability}, the kernel needs {_OLDEST_CAPABILITY}"
    return why_not_shape(device, shape)


def why_not_shape(device: torch.device, shape: AttentionShape) -> str | None:
    """Return why the kernel cannot compute this shape, for a device that has the kernel."""
    if shape.dtype not in _DTYPES:
        return f"the kernel computes in float16 or bfloat16, not in {shape.dtype}"
    if shape.softcap is not None:
        return "the model caps its scores, which the kernel does not"
    if shape.head_dim % _HEAD_MULTIPLE or shape.head_dim > _LARGEST_HEAD:
        return f"the head size {shape.head_dim} is not a multiple of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
    try:
        difference = _probe(device, shape)
    except RuntimeError as exc:
        return f"the kernel refuses pages of {shape.page_size} tokens or heads of {shape.head_dim}: {exc}"
    if not difference < _PROBE_TOLERANCE:
        return f"the kernel differs by {difference:g} from plain attention, more than {_PROBE_TOLERANCE}"
    return None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: PageTable, scoring: Scoring
) -> torch.Tensor:
    attended = varlen_attn(
        query,
        keys,
        values,
        table.starts,
        None,
        table.most_queries,
        table.most_keys,
        scale=scoring.scale,
        # The kernel counts the keys to the left of a query; a window includes the query's own position.
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        enable_gqa=True,
        seqused_k=table.lengths,
        block_table=table.pages,
        # One split, so that a request's tokens do not depend on the other requests of its batch.
        num_splits=1,
    )
    assert isinstance(attended, torch.Tensor), "the kernel returns only the output unless asked for more"
    return attended


@torch.inference_mode()
def _probe(device: torch.device, shape: AttentionShape) -> float:
    """Return the largest difference from plain attention, with and without a window, over pages in reverse order."""
    dtype, heads, kv_heads, head_dim, page_size, _ = shape
    length = page_size * (_PROBE_PAGES - 1) + 1
    queries = min(length, _PROBE_WINDOW + 1)
    source = torch.Generator().manual_seed(0)
    query = torch.randn((queries, heads, head_dim), generator=source).to(device, dtype)
    kept = (_PROBE_PAGES, page_size, kv_heads, head_dim)
    keys, values = (torch.randn(kept, generator=source).to(device, dtype) for _ in range(2))
    backwards = torch.arange(_PROBE_PAGES - 1, -1, -1, device=device)
    own_keys, own_values = (part[backwards].reshape(-1, kv_heads, head_dim)[:length] for part in (keys, values))
    starts, lengths = (torch.tensor(part, dtype=torch.int32, device=device) for part in ([0, queries], [length]))
    table = PageTable(starts, lengths, backwards[None].to(torch.int32), queries, length)
    difference = 0.0
    for window in (None, _PROBE_WINDOW):
        attended = _attend(query, keys, values, table, Scoring(head_dim**-0.5, window))
        expected = _plain(query, own_keys, own_values, window)
        difference = max(difference, float((attended.float() - expected).abs().max()))
    return difference


def _plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Compute plain attention of the last positions of one sequence, in fp32."""
    positions = torch.arange(len(keys), device=keys.device)
    own = positions[len(keys) - len(query) :, None]
    seen = positions <= own
    if window is not None:
        seen &= positions > own - window
    shared = query.shape[1] // keys.shape[1]
    query, keys, values = (states.float().transpose(0, 1) for states in (query, keys, values))
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1)
