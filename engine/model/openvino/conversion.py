"""Converts a stage's slice of a transformers model to an OpenVINO graph, by tracing the module that torch would run.

Marks the places of attention in the graph, which compilation fills. Runs once for each checkpoint and stage: the graph
is cached.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import openvino as ov
import torch
from openvino import op
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.core.errors import OpenVINOError, StepFailedError
from engine.model.dequantization import Integers
from engine.model.fused_decoder import why_not_lean
from engine.model.openvino.paging import Place, StageGraph, mark
from engine.model.stage_slice import OnLoad, StageFacts, StageSlice, attach, attached
from engine.model.weights import WeightFiles

IMPLEMENTATION: Final = "lockstep_openvino"
_TRACED_TOKENS: Final = 5
# Smaller matrices are not converted to 16 bits.
_LEAST_MATRIX_VALUES: Final = 1024
_INT8_LARGEST: Final = 127
# Rows of a matrix to widen at a time.
_WIDENED_ROWS: Final = 8192
# The layer number in the graph's weight names, which counts from the stage's first layer.
_MODULE: Final = "self.module."
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")

_library = torch.library.Library("lockstep", "DEF")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, int size, int width)"
    " -> Tensor"
)
_library.define("widened_linear(Tensor inputs, Tensor weight) -> Tensor")


class TracedStage(nn.Module):
    """A stage with the graph's inputs in the order of ``names``. Also computes one sequence in fp32, uncached."""

    def __init__(
        self, facts: StageFacts, *, trust_remote_code: bool, int8: bool = False, on_load: OnLoad | None = None
    ) -> None:
        super().__init__()
        AttentionInterface.register(IMPLEMENTATION, _traced_attention)
        self._facts = facts
        self._int8 = int8
        # Matrices keep the 16 bits of the checkpoint: in fp32 they would take twice the memory.
        narrow = torch.bfloat16 if facts.dtype is torch.bfloat16 and not int8 else None
        self._slice = StageSlice(
            facts,
            # Results of a graph traced in bfloat16 were wrong by more than half.
            dtype=torch.float32,
            device=torch.device("cpu"),
            implementation=IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
            on_load=on_load,
            matrix_dtype=narrow,
        )
        self.module = self._slice.model
        if narrow is not None:
            _widen_where_used(self.module)
        layers = self._slice.decoder.layers
        for index, layer in enumerate(layers):
            attach(layer, index)
        self._emitting = torch.empty(0, dtype=torch.int64)
        self._narrows = facts.is_last and why_not_lean(self._slice.model) is None
        if self._narrows:
            self._narrow(layers[-1])
        self.names = [
            "input_ids" if facts.is_first else "hidden",
            "position_ids",
            *(["emitting"] if facts.is_last else []),
        ]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute hidden states, or logits of the emitting tokens, from tokens without a batch dimension."""
        given = dict(zip(self.names, inputs, strict=True))
        tokens = inputs[0][None]
        first = {"input_ids": tokens} if self._facts.is_first else {"inputs_embeds": tokens}
        others = {"position_ids": given["position_ids"][None], "use_cache": False}
        if not self._facts.is_last:
            states: torch.Tensor = self._slice.decoder(**first, **others).last_hidden_state
            return states.reshape(-1, self._facts.hidden_size)
        self._emitting = given["emitting"]
        kept = 0 if self._narrows else self._emitting
        logits: torch.Tensor = self._slice.model(**first, **others, logits_to_keep=kept).logits
        return logits.reshape(-1, logits.shape[-1])

    def _narrow(self, layer: Any) -> None:
        """Make the last layer compute only the emitting tokens after its attention, because nobody reads the others."""
        output = layer.self_attn.o_proj
        project = output.forward

        def forward(hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **others)
            states = hidden_states[:, self._emitting] + attended
            narrowed: torch.Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
            return narrowed

        output.forward = lambda attended: project(attended[:, self._emitting])
        layer.forward = forward

    @torch.no_grad()
    def convert(self) -> StageGraph:
        """Trace and convert the graph. Raises OpenVINOError when this model cannot be converted."""
        extensions = (
            ConversionExtension("lockstep::paged_attention", _place_of_attention),
            ConversionExtension("lockstep::widened_linear", _product),
        )
        example = self._example(_TRACED_TOKENS)
        try:
            with warnings.catch_warnings():
                # The tracer reads attributes that transformers has deprecated.
                warnings.simplefilter("ignore")
                # The tracer's own check would trace again; the graph is compared with the module anyway.
                decoder = TorchScriptPythonDecoder(self, example_input=example, trace_kwargs={"check_trace": False})
                # Like openvino.convert_model, but without its telemetry.
                frontend = FrontEndManager().load_by_framework("pytorch")
                for extension in extensions:
                    frontend.add_extension(extension)
                graph: ov.Model = frontend.convert(frontend.load(decoder))
        except (RuntimeError, TypeError, ValueError, StepFailedError) as exc:
            raise OpenVINOError(f"{type(self.module).__name__} cannot be converted for OpenVINO: {exc}") from exc
        if len(graph.inputs) != len(self.names):
            raise OpenVINOError(
                f"the converted {type(self.module).__name__} must have the inputs {self.names}, got {len(graph.inputs)}"
            )
        for name, port, parameter in zip(self.names, graph.inputs, graph.get_parameters(), strict=True):
            port.get_tensor().set_names({name})
            kind, shape = self._port(name)
            parameter.set_element_type(kind)
            parameter.set_partial_shape(ov.PartialShape(shape))
        graph.validate_nodes_and_infer_types()
        if self._facts.quantization is not None:
            _keep_integers(graph, self._facts)
        if self._int8:
            _round_matrices_to_int8(graph)
        if self._facts.dtype is torch.bfloat16:
            _store_matrices_as_bf16(graph)
        return StageGraph(graph, self)

    @torch.no_grad()
    def compute(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute an example sequence of ``tokens`` tokens. Returns the first input and the output."""
        inputs = self._example(tokens)
        return inputs[0], self(*inputs)

    def _port(self, name: str) -> tuple[ov.Type, list[int]]:
        return (ov.Type.f32, [-1, self._facts.hidden_size]) if name == "hidden" else (ov.Type.i64, [-1])

    def _example(self, tokens: int) -> tuple[torch.Tensor, ...]:
        count = torch.arange(tokens)
        wave = torch.sin(torch.arange(tokens * self._facts.hidden_size, dtype=torch.float32))
        hidden = wave.view(tokens, self._facts.hidden_size)
        return tuple(hidden if name == "hidden" else count for name in self.names)


def _widen_where_used(module: nn.Module) -> None:
    """Make plain layers compute in fp32 with matrices that stay 16-bit, in memory and in the graph."""
    for part in module.modules():
        weight = part._parameters.get("weight")  # noqa: SLF001 - the module's own, not a child's
        if weight is not None and weight.dtype is torch.bfloat16:
            compute: Callable[..., torch.Tensor] = _linear if isinstance(part, nn.Linear) else _embedding
            part.forward = partial(compute, part)


def _linear(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.lockstep.widened_linear(inputs, layer.weight)
    return product if layer.bias is None else product + layer.bias


def _embedding(layer: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    # Widened after the lookup, because an fp32 table would be kept in addition to the head's matrix.
    return functional.embedding(ids, layer.weight).to(torch.float32)


@torch.library.impl(_library, "widened_linear", "CPU")
def _widened_linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by a matrix that is widened part by part: a whole head in fp32 can be half as large as the model."""
    parts = [weight[first : first + _WIDENED_ROWS] for first in range(0, len(weight), _WIDENED_ROWS)]
    return torch.cat([functional.linear(inputs, part.to(torch.float32)) for part in parts], dim=-1)


def _product(context: Any) -> list[ov.Output]:
    """Convert ``lockstep::widened_linear`` to a product whose matrix stays in 16 bits."""
    inputs, weight = context.get_input(0), context.get_input(1)
    return [ov.opset15.matmul(inputs, ov.opset15.convert(weight, "f32"), False, True).output(0)]


def _traced_attention(
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
    """Stand in for attention, with transformers' signature; query, key and value are [1, heads, tokens, size]."""
    del attention_mask, others
    if softcap is not None or s_aux is not None:
        raise StepFailedError("OpenVINO's paged attention has no capped scores and no sinks; use backend='torch'")
    heads, size = query.shape[1], query.shape[3]
    flat = [states.transpose(1, 2).reshape(-1, states.shape[1] * size) for states in (query, key, value)]
    layer: int = attached(module)
    scale = scaling if scaling is not None else size**-0.5
    attended = torch.ops.lockstep.paged_attention(*flat, layer, scale, sliding_window or 0, size, heads * size)
    return attended.reshape(1, -1, heads, size), None


@torch.library.impl(_library, "paged_attention", "CPU")
def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    size: int,
    width: int,
) -> torch.Tensor:
    """Compute attention within one uncached sequence, as the reference for the graph."""
    del layer, width
    queries, keys, values = (states.view(len(query), -1, size).transpose(0, 1) for states in (query, key, value))
    positions = torch.arange(len(query))
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return attended.transpose(0, 1).reshape(query.shape)


def _place_of_attention(context: Any) -> list[ov.Output]:
    """Convert a call of ``lockstep::paged_attention`` to a mark of attention's place."""
    query, key, value = (context.get_input(index) for index in range(3))
    layer, scale, window, width = (context.get_values_from_const_input(index) for index in (3, 4, 5, 7))
    place = Place(layer=int(layer), scale=float(scale), window=int(window))
    return [mark(query, key, value, place, width=int(width))]


def _matrices(graph: ov.Model) -> list[Any]:
    constants = [node for node in graph.get_ordered_ops() if node.get_type_name() == "Constant"]
    whole = [node for node in constants if node.get_element_type() == ov.Type.f32 and len(node.shape) == 2]
    return [node for node in whole if np.prod(node.shape) >= _LEAST_MATRIX_VALUES]


def _keep_integers(graph: ov.Model, facts: StageFacts) -> None:
    """Replace weights by the checkpoint's integers, if it has any, which are widened where they are used."""
    with WeightFiles(facts.folder, quantization=facts.quantization, is_part=facts.is_text_part) as files:
        for node in [node for node in graph.get_ordered_ops() if node.get_type_name() == "Constant"]:
            name = _LAYER.sub(lambda found: f".layers.{int(found[1]) + facts.layers.start}.", node.get_friendly_name())
            kept = files.integers(name.removeprefix(_MODULE))
            if kept is None or tuple(kept.values.shape) != tuple(node.shape):
                continue
            # A 16-bit weight has a Convert before its product; the widened integers replace that.
            for place in node.output(0).get_target_inputs():
                if (used := place.get_node()).get_type_name() == "Convert":
                    used.output(0).replace(_widened(kept).output(0))
                elif used.get_type_name() == "MatMul":
                    place.replace_source_output(_widened(kept).output(0))


def _widened(kept: Integers) -> Any:
    """Build the node that widens an integer weight to fp32."""
    rows, columns = kept.values.shape
    count = kept.scales.shape[1]
    grouped = [rows, columns] if count == 1 else [rows, count, columns // count]
    beside = [rows, 1] if count == 1 else [rows, count, 1]
    widened = ov.opset15.convert(_integers(kept.values, kept.bits, grouped, signed=kept.zeros is None), "f32")
    if kept.zeros is not None:
        zeros = ov.opset15.convert(_integers(kept.zeros, kept.bits, beside, signed=False), "f32")
        widened = ov.opset15.subtract(widened, zeros)
    widened = ov.opset15.multiply(widened, op.Constant(kept.scales.float().reshape(beside).numpy()))
    if count > 1:
        widened = ov.opset15.reshape(widened, op.Constant(np.array([rows, columns], np.int64)), special_zero=False)
    return widened


def _integers(values: torch.Tensor, bits: int, shape: list[int], *, signed: bool) -> Any:
    """Build a constant of integers; two 4-bit values share a byte, the first in its lower half."""
    if signed:
        return op.Constant(values.to(torch.int8).reshape(shape).numpy())
    flat = values.to(torch.uint8).flatten()
    if bits == 8:
        return op.Constant(flat.reshape(shape).numpy())
    flat = functional.pad(flat, (0, len(flat) % 2))
    packed = (flat[::2] | (flat[1::2] << 4)).numpy()
    return op.Constant(ov.Tensor(packed, ov.Shape(shape), ov.Type.u4), shared_memory=False)


def _round_matrices_to_int8(graph: ov.Model) -> None:
    """Round the matrices of products to 8 bits, with a scale for each output. Leaves embeddings unchanged."""
    for node in _matrices(graph):
        products = [
            place for place in node.output(0).get_target_inputs() if place.get_node().get_type_name() == "MatMul"
        ]
        if not products:
            continue
        # The matrix of a linear layer is [out, in].
        scales = np.maximum(np.abs(node.data).max(axis=1, keepdims=True) / _INT8_LARGEST, np.finfo(np.float32).tiny)
        rounded = op.Constant(np.rint(node.data / scales).astype(np.int8))
        widened = ov.opset15.multiply(ov.opset15.convert(rounded, "f32"), op.Constant(scales.astype(np.float32)))
        for place in products:
            place.replace_source_output(widened.output(0))


def _store_matrices_as_bf16(graph: ov.Model) -> None:
    """Store the remaining fp32 matrices in the checkpoint's 16 bits; they are widened where they are used."""
    for node in _matrices(graph):
        narrow = torch.tensor(node.data, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
        kept = op.Constant(ov.Tensor(narrow, ov.Shape(narrow.shape), ov.Type.bf16), shared_memory=False)
        node.output(0).replace(ov.opset15.convert(kept, "f32").output(0))
