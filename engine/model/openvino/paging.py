"""Paged attention in a graph: the marks that a conversion leaves, and the nodes that replace them.

A graph with the nodes can be compiled but not read from a file, so graphs are cached with the marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import openvino as ov
from openvino import op, opset15
from openvino.op import _PagedAttentionExtension

from engine.core.config import OPENVINO_BLOCK_TOKENS
from engine.core.errors import OpenVINOError
from engine.model.checkpoint import heads_of
from engine.model.openvino.batch import block_names
from engine.model.stage_slice import StageFacts

_PREFIX: Final = "lockstep.paged_attention:"


class StageGraph(NamedTuple):
    """A graph with marks for attention, and the owner of its constants' memory, which must outlive the graph, or the
    file of the constants.
    """

    graph: ov.Model
    owner: object = None
    file: Path | None = None


class Place(msgspec.Struct, frozen=True):
    """The attention of one layer, counted within its stage; a window of 0 means none."""

    layer: int
    scale: float
    window: int


def mark(query: ov.Output, key: ov.Output, value: ov.Output, place: Place, *, width: int) -> ov.Output:
    """Make a node that marks a place of attention, with its inputs and output, and survives graph rewriting.

    ``width`` is the width of the queries over all heads.
    """
    joined = opset15.concat([query, key, value], axis=1)
    columns = np.arange(width, dtype=np.int64)
    held = opset15.gather(joined, op.Constant(columns), op.Constant(np.array(1, np.int64)))
    held.set_friendly_name(_PREFIX + msgspec.json.encode(place).decode())
    return held.output(0)


def with_paged_attention(graph: ov.Model, facts: StageFacts) -> ov.Model:
    """Return the graph with OpenVINO's paged attention at its marks, and with caches and block tables as inputs.

    Layer N of the stage has the inputs ``key_cache.N`` and ``value_cache.N``. Modifies the given graph.
    """
    paging = _Paging(facts)
    marks = [node for node in graph.get_ordered_ops() if node.get_friendly_name().startswith(_PREFIX)]
    for node in marks:
        place = msgspec.json.decode(node.get_friendly_name().removeprefix(_PREFIX), type=Place)
        joined = node.input_value(0).get_node()
        query, key, value = (joined.input_value(index) for index in range(3))
        node.output(0).replace(paging.attend(query, key, value, place))
    if len(marks) != len(facts.layers):
        raise OpenVINOError(
            f"each of {len(facts.layers)} layers must attend once, but the graph has {len(marks)} attentions"
        )
    graph.add_parameters(list(paging.inputs.values()))
    graph.validate_nodes_and_infer_types()
    return graph


class _Paging:
    """The inputs of paged attention, one for each name, and the nodes that read them."""

    def __init__(self, facts: StageFacts) -> None:
        self._facts = facts
        self._kv_heads, self._head_dim = heads_of(facts.model_config, facts.folder)
        self.inputs: dict[str, ov.Node] = {}

    def attend(self, query: ov.Output, key: ov.Output, value: ov.Output, place: Place) -> ov.Output:
        cache = [-1, self._kv_heads, OPENVINO_BLOCK_TOKENS, self._head_dim]
        caches = [self._input(f"{kind}_cache.{place.layer}", ov.Type.f32, cache) for kind in ("key", "value")]
        *tables, longest = block_names(windowed=self._facts.windowed[place.layer])
        past, blocks, begins = [self._input(name, ov.Type.i32, [-1]) for name in tables]
        whole, number = np.int32, np.float32
        # In the order of OpenVINO 2026.4. Unused features get empty inputs.
        node = _PagedAttentionExtension(
            [
                *[query, key, value, *caches, past, self._input("subsequence_begins", ov.Type.i32, [-1])],
                *[blocks, begins, _constant(place.scale, number), _constant(place.window, whole)],
                _constant([], number),  # alibi slopes
                self._input(longest, ov.Type.i32, []),
                _constant([], whole),  # score aggregation window
                *[_constant([], whole), _constant([], whole), _constant([], number)],  # rotated blocks
                *[_constant([], number), _constant(0, whole), _constant(0, whole)],  # sparse attention
                _constant([], number),  # sinks
                *[_constant(0, whole), *[_constant([], whole)] * 3],  # eviction of keys
                _constant([], whole),  # types of tokens
                *[_constant([], np.uint8), _constant([], whole)],  # biases between queries
            ]
        )
        described = node.get_rt_info()
        for letter in ("k", "v"):
            described[f"num_{letter}_heads"] = self._kv_heads
            described[f"{letter}_head_size"] = self._head_dim
        output: ov.Output = node.output(0)
        return output

    def _input(self, name: str, kind: ov.Type, shape: list[int]) -> ov.Output:
        if name not in self.inputs:
            parameter = opset15.parameter(shape, kind, name=name)
            parameter.output(0).get_tensor().set_names({name})
            self.inputs[name] = parameter
        return self.inputs[name].output(0)


def _constant(value: Any, kind: type[np.generic]) -> ov.Output:
    return op.Constant(np.array(value, kind)).output(0)
