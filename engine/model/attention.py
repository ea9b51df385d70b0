"""Paged attention for transformers models: writes K and V into the pool, attends over each row's pages.

Registered once with transformers under a name; each attention module has its layer's view of the pool, so that several
stages can share a process. Called once per layer and forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.core.errors import StepFailedError
from engine.model.batch import AttentionGroup, LayersBatch, LayersView
from engine.model.kv_pool import KVPool
from engine.model.stage_slice import attached

IMPLEMENTATION = "lockstep_paged"


class StageAttention:
    """State shared by the layers of a stage: the pools, and the current batch."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.batch: LayersBatch | None = None
        self.calls = 0

    def pool_of(self, *, windowed: bool) -> KVPool:
        if not windowed:
            return self.pool
        assert self.pool.window is not None, "a window layer without a window pool"
        return self.pool.window

    def enter(self, *, windowed: bool, window: int | None) -> LayersView:
        """Count a layer's call and return the batch's view of its pool.

        Raises StepFailedError for a layer of the window pool that would see more tokens than the pool keeps.
        """
        assert self.batch is not None, "attention was called outside a stage's forward pass"
        self.calls += 1
        if not windowed:
            return self.batch.full
        kept = self.pool_of(windowed=True).window_tokens
        if window is None or window > kept:
            raise StepFailedError(
                f"a window layer must see {kept} tokens, as the configuration says, but sees {window}"
            )
        assert self.batch.window is not None, "a batch over a pool with a window has a view of it"
        return self.batch.window


class Scoring(NamedTuple):
    """How attention scores are computed: their scale, the window if any, the cap if the model has one."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class PagedAttention(ABC):
    """The attention of one layer over its part of the pool; ``layer`` is the layer's index within its pool."""

    def __init__(self, stage: StageAttention, layer: int, *, windowed: bool = False) -> None:
        self._stage = stage
        self._layer = layer
        self._windowed = windowed
        self.bind()

    def bind(self) -> None:
        """Use the layer's part of the stage's current pool."""
        pool = self._stage.pool_of(windowed=self._windowed)
        self._keys, self._values = pool.keys[self._layer], pool.values[self._layer]

    @abstractmethod
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Store key and value, then attend: query [tokens, heads, size], key and value [tokens, kv heads, size].

        Returns [tokens, heads, size].
        """


class LayerAttention(PagedAttention):
    """Gathers keys and values, then attends. Runs on any device."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See ``PagedAttention``. Rounds keys and values to the pool's dtype, which may differ from the query's."""
        batch = self._stage.enter(windowed=self._windowed, window=scoring.window)
        self._keys.index_copy_(1, batch.new_slots, key.transpose(0, 1).to(self._keys.dtype))
        self._values.index_copy_(1, batch.new_slots, value.transpose(0, 1).to(self._values.dtype))
        outputs = [self._attend(query[group.tokens], group, scoring) for group in batch.groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, query: torch.Tensor, group: AttentionGroup, scoring: Scoring) -> torch.Tensor:
        """Attend for one group: query [rows * queries, heads, size] to the same shape."""
        tokens, heads, size = query.shape
        keys = _gather(self._keys, group).to(query.dtype)  # [kv heads, rows, keys, size]
        values = _gather(self._values, group).to(query.dtype)
        kv_heads = keys.shape[0]
        shared = heads // kv_heads
        causal = scoring.softcap is None and group.causal(scoring.window)
        mask = None if causal else group.mask(scoring.window, query.dtype)
        if group.queries == 1:
            # Heads that share a KV head become extra queries, so that K and V need no repetition.
            query = query.reshape(tokens, kv_heads, shared, size).transpose(0, 1)
            attended = _attention(query, keys, values, mask, scoring)
            return attended.transpose(0, 1).reshape(tokens, heads, size)
        if group.rows > 1:
            assert mask is not None, "rows with several queries need a mask"
            # The mask repeats likewise: a row's queries are consecutive for each of these heads.
            together = (group.rows, group.queries, kv_heads, shared, size)
            query = query.reshape(together).permute(2, 0, 3, 1, 4).flatten(2, 3)
            attended = _attention(query, keys, values, mask.repeat(1, 1, shared, 1), scoring)
            attended = attended.reshape(kv_heads, group.rows, shared, group.queries, size)
            return attended.permute(1, 3, 0, 2, 4).reshape(tokens, heads, size)
        query = query.transpose(0, 1).reshape(kv_heads, shared, tokens, size)
        keys, values = keys.expand(-1, shared, -1, -1), values.expand(-1, shared, -1, -1)
        attended = _attention(query, keys, values, mask, scoring, causal=causal)
        return attended.reshape(heads, tokens, size).transpose(0, 1)


def register() -> None:
    """Make the implementation known to transformers; idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _paged_attention)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature that transformers calls. ``others`` are for other kernels and change no
    result.
    """
    del others
    if s_aux is not None:
        raise StepFailedError("attention sinks are not supported by paged attention")
    if attention_mask is not None:
        raise StepFailedError("an architecture-specific mask is not supported by paged attention")
    layer: PagedAttention = attached(module)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return layer.attend(query, key, value, scoring)[None], None


def _gather(slots: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """Return a group's part [kv heads, rows, keys, size] of keys or values; a view where its slots are contiguous.

    ``index_select`` over flat slots took a fifth of the time of indexing with a matrix.
    """
    if group.run is not None:
        return slots[:, None, group.run]
    return slots.index_select(1, group.slots).view(slots.shape[0], group.rows, group.keys, -1)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    causal: bool = False,
) -> torch.Tensor:
    scale, _, softcap = scoring
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, is_causal=causal)
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores.float(), dim=-1).to(query.dtype) @ values
