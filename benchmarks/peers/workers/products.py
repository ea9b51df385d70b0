"""Only the matrix products of a model's layers and head: no engine on OpenVINO's products can be faster.

There are no attention, norms, sampling or scheduler, and the head computes only emitting tokens. Run: ``python -m
...products FOLDER DTYPE``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from benchmarks.peers.workers.pipes import Generate, model_config, serve_batches

_HINTS: Final = {"float32": "f32", "bfloat16": "bf16"}
_STORED: Final = {"float32": np.float32, "bfloat16": np.float16}
# Prompt tokens that are computed at once; more were no faster.
_MOST_TOKENS: Final = 1024


def graph_of(config: dict[str, Any]) -> ov.Model:
    """Build all products of a model in sequence: ``states`` [tokens, hidden] to the logits of ``emitting``."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layers = config["num_hidden_layers"]
    numbers = np.random.default_rng(0)
    stored = _STORED[config["dtype"]]

    def product(inputs: Any, outputs: int, size: int) -> Any:
        # Scaled so that the values stay near 1 through all layers.
        weight = (numbers.standard_normal((outputs, size), np.float32) * size**-0.5).astype(stored)
        return ops.matmul(inputs, ops.convert(ops.constant(weight), "f32"), False, True)

    states, emitting = ops.parameter([-1, hidden], ov.Type.f32), ops.parameter([-1], ov.Type.i64)
    rows = states
    for layer in range(layers):
        values = [product(rows, keys, hidden) for _ in range(2)]
        attended = ops.add(product(rows, queries, hidden), ops.concat(values * (queries // (2 * keys)), 1))
        if layer == layers - 1:
            attended = ops.gather(attended, emitting, ops.constant(0))
        rows = product(attended, hidden, queries)
        rows = product(ops.multiply(product(rows, inner, hidden), product(rows, inner, hidden)), hidden, inner)
        rows = ops.divide(rows, ops.add(ops.abs(rows), ops.constant(np.float32(1))))
    return ov.Model([product(rows, config["vocab_size"], hidden)], [states, emitting], "products")


def load(folder: Path, dtype: str) -> Generate:
    """Make a function that computes each batch's products: its prompts, then a step for each further token."""
    config = model_config(folder) | {"dtype": dtype}
    settings = {
        "INFERENCE_PRECISION_HINT": _HINTS[dtype],
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(graph_of(config), "CPU", settings).create_infer_request()
    values = np.random.default_rng(1).standard_normal((_MOST_TOKENS, config["hidden_size"]), np.float32)

    def forward(tokens: int, ends: list[int]) -> None:
        request.infer([values[:tokens], np.array(ends, np.int64)], share_inputs=True, share_outputs=True)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        size = len(prompts[0])
        together = max(1, _MOST_TOKENS // size)
        for first in range(0, len(prompts), together):
            count = min(together, len(prompts) - first)
            forward(count * size, [(number + 1) * size - 1 for number in range(count)])
        for _ in range(new_tokens - 1):
            forward(len(prompts), list(range(len(prompts))))

    return generate


if __name__ == "__main__":
    serve_batches(load)
