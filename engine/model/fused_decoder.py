"""A lean forward pass for Llama-like decoders: the weights of the transformers model, without its overhead.

Fuses matrix products, looks up rotary angles, and computes in fp32 on a CPU without 16-bit arithmetic. Never reads a
number from a GPU, so that its decodes can be captured. Supports only architectures for which it is exact; transformers
computes all others. Built once, when a stage has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm

from engine.model.arithmetic import LEAN_ARCHITECTURES
from engine.model.attention import PagedAttention, Scoring
from engine.model.batch import LayersBatch
from engine.model.lora import BatchLoras
from engine.model.matrix_product import MatrixProduct
from engine.model.prompt_logprobs import ScoreTaker, scored_rows, slices_of

# Architectures share no type that declares their parts (layers, norm, embed_tokens).
_Transformer = Any

_ARCHITECTURES = frozenset(LEAN_ARCHITECTURES.values())
# Types whose angles depend only on the position, not on the length of the sequence.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_FIRST_ANGLES = 1024
# The linears that each matrix product of a layer fuses.
PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_QUERY_KEY_VALUE, _OUTPUT, _GATE_UP, _DOWN = range(len(PRODUCTS))


def why_not_lean(model: _Transformer) -> str | None:
    """Return why transformers must compute a stage's model; None if ``LeanDecoder`` is exact for it."""
    name = type(model).__name__
    if name not in _ARCHITECTURES or not type(model).__module__.startswith("transformers."):
        return f"{name} is not one of {', '.join(sorted(_ARCHITECTURES))}"
    rope = model.base_model.rotary_emb.rope_type
    if rope not in _ROPE_TYPES:
        return f"its rope_type is {rope!r}, not one of {', '.join(sorted(_ROPE_TYPES))}"
    for layer in model.base_model.layers:
        biased = [layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        if any(linear.bias is not None for linear in biased):
            return "its projections have biases"
    return None


class LeanDecoder:
    """The layers of one stage, with the embedding and the head if the stage has them.

    ``layers`` are the attentions of ``model``'s layers, in order. With ``packs`` the weights of products are packed if
    this CPU supports it; plain weights of the same type are shared with ``model``, whose parameters become views. With
    ``is_mapped`` its parameters are views of files, so every kept weight is copied. A last stage without a head returns
    states after the norm, with ``shows_all`` for all tokens.
    """

    def __init__(
        self,
        model: _Transformer,
        layers: Sequence[PagedAttention],
        dtype: torch.dtype,
        *,
        packs: bool = False,
        is_mapped: bool = False,
        shows_all: bool = False,
    ) -> None:
        decoder = model.base_model
        joins = _Joins(dtype, packs=packs)
        self._shows_all = shows_all
        self._dtype = dtype
        kept = None if decoder.embed_tokens is None else decoder.embed_tokens.weight
        self._embedding = kept.clone() if is_mapped and kept is not None else kept
        self._angles = _RotaryAngles(decoder.rotary_emb, dtype, next(decoder.layers.parameters()).device)
        pairs = zip(decoder.layers, layers, strict=True)
        self._layers = [_lean_layer(layer, paged, joins) for layer, paged in pairs]
        head = model.get_output_embeddings()
        self._norm = None if isinstance(decoder.norm, nn.Identity) else _norm(decoder.norm, dtype)
        self._head = None if head is None else joins.head(head, self._embedding if head.weight is kept else None)
        self.is_packed = joins.packs

    def forward(
        self,
        batch: LayersBatch,
        hidden: torch.Tensor | None,
        take_scored: ScoreTaker | None = None,
        loras: BatchLoras | None = None,
    ) -> torch.Tensor:
        """Compute hidden states [tokens, hidden size], or on the last stage logits [emitting tokens, vocabulary].

        ``take_scored`` gets the logits for prompt logprobs.
        """
        if hidden is None:
            assert self._embedding is not None, "a stage without an embedding got no hidden states"
            hidden = embedding(batch.token_ids[0], self._embedding)
        states = hidden.to(self._dtype)
        cos, sin = self._angles.of(batch)
        # The last layer computes only the emitting tokens if nobody reads the others.
        last = len(self._layers) - 1
        read_whole = self._norm is None or self._shows_all or take_scored is not None or loras is not None
        emitting = None if read_whole or len(batch.emitting) == batch.tokens else batch.emitting
        for index, layer in enumerate(self._layers):
            states = layer(states, cos, sin, index, loras, emitting if index == last else None)
        if self._norm is None:
            return states
        if self._shows_all:
            return self._norm(states)
        if take_scored is not None:
            assert self._head is not None, "a stage without a head has no logits"
            for rows in slices_of(scored_rows(batch.segments)):
                take_scored(self._head(self._norm(states[rows])))
        if len(states) != len(batch.emitting):
            states = states.index_select(0, batch.emitting)
        states = self._norm(states)
        return states if self._head is None else self._head(states)


class _RotaryAngles:
    """Cosines and sines by position, computed by the model's own module; grows with the highest position so far."""

    def __init__(
        self, module: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._module = module
        self._dtype, self._device = dtype, device
        self._table = self._make(_FIRST_ANGLES)

    def of(self, batch: LayersBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both for every token of a batch, each [tokens, 1, head size]."""
        last = batch.last_position
        if last >= len(self._table):
            self._table = self._make(max(last + 1, 2 * len(self._table)))
        angles = self._table.index_select(0, batch.positions[0])
        return angles[:, :1], angles[:, 1:]

    def _make(self, count: int) -> torch.Tensor:
        """Compute [positions, 2, head size]. The first half of each sine is negated, so rotating a head is a roll."""
        like = torch.zeros((), dtype=self._dtype, device=self._device)
        cos, sin = self._module(like, torch.arange(count, device=self._device)[None])
        half = sin.shape[-1] // 2
        return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root-mean-square normalization of the last dimension; ``weight`` may have more dimensions before it.

    In fp32 the mean of the squares is a product with ``shares``, a column of 1/size, which takes half the time.
    """

    weight: torch.Tensor
    eps: float
    shares: torch.Tensor
    floor: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> _Norm:
        size, device = weight.shape[-1], weight.device
        shares, floor = torch.full((size, 1), 1 / size, device=device), torch.full((1,), eps, device=device)
        return cls(weight.to(dtype, copy=True), eps, shares, floor)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        size = self.weight.shape[-1]
        if states.dtype != torch.float32:
            return rms_norm(states, (size,), None, self.eps) * self.weight
        scales = torch.addmm(self.floor, (states * states).view(-1, size), self.shares).rsqrt_()
        return scales.view(*states.shape[:-1], 1).mul(states).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _LeanLayer:
    """One layer of the stage."""

    attention: PagedAttention
    input_norm: _Norm
    query_key_value: MatrixProduct
    bias: torch.Tensor | None
    query_key_norm: _Norm | None
    output: MatrixProduct
    mlp_norm: _Norm
    gate_up: MatrixProduct
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: MatrixProduct
    heads: int
    kv_heads: int
    scoring: Scoring

    def __call__(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        loras: BatchLoras | None,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map states [tokens, hidden size] to the same shape; ``cos`` and ``sin`` are [tokens, 1, head size].

        ``loras`` are added to the products of this layer, the ``layer``-th of the stage. With ``read``, and without
        ``loras``, only the states of these tokens are computed after attention: [read, hidden size].
        """
        inputs = self.input_norm(states)
        projected = self.query_key_value(inputs)
        if loras is not None:
            loras.add(layer, _QUERY_KEY_VALUE, inputs, projected)
        attended = self._attend(projected, cos, sin)
        if read is not None:
            states, attended = states.index_select(0, read), attended.index_select(0, read)
        states = self.output.added_to(states, attended)
        if loras is not None:
            loras.add(layer, _OUTPUT, attended, states)
        inputs = self.mlp_norm(states)
        projected = self.gate_up(inputs)
        if loras is not None:
            loras.add(layer, _GATE_UP, inputs, projected)
        gate, up = projected.chunk(2, dim=-1)
        inputs = self.activation(gate) * up
        states = self.down.added_to(states, inputs)
        if loras is not None:
            loras.add(layer, _DOWN, inputs, states)
        return states

    def _attend(self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend with queries, keys and values side by side: [tokens, heads * head size]."""
        tokens, size = projected.shape[0], cos.shape[-1]
        if self.bias is not None:
            projected += self.bias
        heads = projected.view(tokens, -1, size)
        rotated, value = heads[:, : self.heads + self.kv_heads], heads[:, self.heads + self.kv_heads :]
        if self.query_key_norm is not None:
            rotated = self.query_key_norm(rotated)
        rotated = torch.addcmul(rotated * cos, torch.roll(rotated, size // 2, -1), sin)
        attended = self.attention.attend(rotated[:, : self.heads], rotated[:, self.heads :], value, self.scoring)
        return attended.reshape(tokens, -1)


class _Joins:
    """Joins the weights of linears into products, packed or plain.

    Weights are joined in a scratch tensor and packed from there. Each product reuses it, because fresh memory from the
    system costs more time than the copy.
    """

    def __init__(self, dtype: torch.dtype, *, packs: bool) -> None:
        self.dtype = dtype
        self.packs = packs
        self._scratch = torch.empty(0, dtype=dtype)

    def product(self, linears: Sequence[nn.Linear]) -> MatrixProduct:
        return self._packed(linears) or _fused(linears, self.dtype)

    def head(self, head: nn.Linear, tied: torch.Tensor | None) -> MatrixProduct:
        """Build the product of states with the head. A tied head is a view of the embedding, with contiguous rows."""
        packed = self._packed([head])
        if packed is None and tied is not None:
            return MatrixProduct(tied.to(self.dtype).t())
        return packed or _fused([head], self.dtype)

    def _packed(self, linears: Sequence[nn.Linear]) -> MatrixProduct | None:
        """Pack the joined weight. After one failure no other is tried."""
        if not self.packs:
            return None
        product = MatrixProduct.packed(self._joined([linear.weight for linear in linears]))
        self.packs = product is not None
        return product

    def _joined(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights stacked; valid until the next call."""
        if len(weights) == 1 and weights[0].dtype == self.dtype:
            return weights[0]
        rows, columns = sum(map(len, weights)), weights[0].shape[1]
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns, dtype=self.dtype)
        joined = self._scratch[: rows * columns].view(rows, columns)
        for part, weight in zip(joined.split([len(weight) for weight in weights]), weights, strict=True):
            part.copy_(weight)
        return joined


def _lean_layer(layer: _Transformer, paged: PagedAttention, joins: _Joins) -> _LeanLayer:
    attention, mlp, dtype = layer.self_attn, layer.mlp, joins.dtype
    size = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    return _LeanLayer(
        attention=paged,
        input_norm=_norm(layer.input_layernorm, dtype),
        query_key_value=joins.product(projections),
        bias=_fused_bias(projections, dtype),
        query_key_norm=_query_key_norm(attention, heads, kv_heads, dtype),
        output=joins.product([attention.o_proj]),
        mlp_norm=_norm(layer.post_attention_layernorm, dtype),
        gate_up=joins.product([mlp.gate_proj, mlp.up_proj]),
        activation=mlp.act_fn,
        down=joins.product([mlp.down_proj]),
        heads=heads,
        kv_heads=kv_heads,
        scoring=Scoring(attention.scaling, getattr(attention, "sliding_window", None) or _window_of(attention)),
    )


def _window_of(attention: _Transformer) -> int | None:
    """Return a layer's window. Mistral has one window for all layers in its configuration."""
    if type(attention).__name__ != "MistralAttention":
        return None
    window: int | None = attention.config.sliding_window
    return window


def _query_key_norm(attention: _Transformer, heads: int, kv_heads: int, dtype: torch.dtype) -> _Norm | None:
    """Join the norms of queries and keys, with a weight per head."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    assert query.variance_epsilon == key.variance_epsilon, "queries and keys are normalized with different epsilons"
    weight = torch.cat([query.weight.expand(heads, -1), key.weight.expand(kv_heads, -1)])
    return _Norm.of(weight, query.variance_epsilon, dtype)


def _norm(module: _Transformer, dtype: torch.dtype) -> _Norm:
    return _Norm.of(module.weight, module.variance_epsilon, dtype)


def _fused(linears: Sequence[nn.Linear], dtype: torch.dtype) -> MatrixProduct:
    """Build the product with the joined weights of linears, which become views of it, so that no weight is kept twice.

    On a CPU a product of 1 to 8 rows takes a tenth to a quarter less time with weights stored as [in, out]. A GPU keeps
    the order that its libraries expect.
    """
    fused = torch.cat([linear.weight for linear in linears]).to(dtype).t()
    if fused.device.type == "cpu":
        fused = fused.contiguous()
    if dtype == linears[0].weight.dtype:
        parts = torch.split(fused.t(), [linear.out_features for linear in linears])
        for linear, part in zip(linears, parts, strict=True):
            linear.weight = nn.Parameter(part, requires_grad=False)
    return MatrixProduct(fused)


def _fused_bias(linears: Sequence[nn.Linear], dtype: torch.dtype) -> torch.Tensor | None:
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some of query, key and value have a bias and some have none"
    return torch.cat(biases).to(dtype) if biases else None
