"""A graph compiled for this CPU, and its inference request. Small inputs are set for each call, caches once for a pool.

Owns OpenVINO's settings. Never decides what to compute.
"""

from __future__ import annotations

from typing import Any, Final

import openvino as ov
import torch
from numpy.typing import NDArray

from engine.core.errors import OpenVINOError
from engine.core.limits import Limits
from engine.model.openvino.batch import BlockBatch, BlockFormat, BlockPool
from engine.model.openvino.paging import with_paged_attention
from engine.model.stage_slice import StageFacts

_HINTS: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
_KINDS: Final = ("key", "value")


class CompiledStage:
    """Computes a stage with ``threads`` threads, over the pool of the last ``take_pool``.

    Consumes ``graph``, which marks the places of attention. Raises OpenVINOError if this CPU cannot run it.
    """

    def __init__(self, graph: ov.Model, facts: StageFacts, *, threads: int, kv_cache_dtype: str = "auto") -> None:
        hint = _HINTS[facts.dtype]
        kept_in = hint if kv_cache_dtype == "auto" else kv_cache_dtype
        settings = {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": kept_in,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": threads,
            # Pinning would bind the processes of several stages, or of several servers, to the same core.
            "ENABLE_CPU_PINNING": False,
        }
        if facts.quantization is not None:
            # Otherwise OpenVINO would also round the activations of integer products to 8 bits.
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        try:
            compiled = ov.Core().compile_model(with_paged_attention(graph, facts), "CPU", settings)
        except RuntimeError as exc:
            raise OpenVINOError(f"OpenVINO {ov.__version__} cannot compile the model for this CPU: {exc}") from exc
        ports = {port.any_name: port for port in compiled.inputs}
        self._formats = {name: _format(port) for name, port in ports.items() if "_cache." in name}
        kinds = {block.kind for block in self._formats.values()}
        if kinds != {kept_in}:
            raise OpenVINOError(
                f"OpenVINO must keep the KV in {kept_in} here, but keeps it in {', '.join(sorted(kinds))}"
            )
        self._facts = facts
        self._request = compiled.create_infer_request()
        self._given: dict[str, NDArray[Any]] = {}
        self._small = [name for name in ports if "_cache." not in name and name != "hidden"]

    def new_pool(self, limits: Limits) -> BlockPool:
        """Allocate a pool of blocks for this stage's layers, with a separate one for window layers.

        Raises MemoryError.
        """
        pool = BlockPool(limits, self._formats_of(windowed=False))
        if limits.window_tokens:
            pool.window = BlockPool(limits, self._formats_of(windowed=True), window_tokens=limits.window_tokens)
        return pool

    def take_pool(self, pool: BlockPool) -> None:
        """Use the caches of a pool from now on."""
        layers: list[tuple[ov.Tensor, ov.Tensor]] = []
        for index, windowed in enumerate(self._facts.windowed):
            own = pool.window if windowed else pool
            assert isinstance(own, BlockPool), "a stage with window layers has a window pool of blocks"
            layers.append(own.caches[self._facts.windowed[:index].count(windowed)])
        for name in self._formats:
            kind, _, index_text = name.partition("_cache.")
            self._request.set_tensor(name, layers[int(index_text)][_KINDS.index(kind)])

    def _give(self, name: str, array: NDArray[Any]) -> None:
        """Set an array as an input without a copy, and keep it alive. Does nothing if it is already set."""
        if self._given.get(name) is not array:
            self._given[name] = array
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))

    def _formats_of(self, *, windowed: bool) -> list[tuple[BlockFormat, BlockFormat]]:
        layers = [index for index, own in enumerate(self._facts.windowed) if own is windowed]
        keys, values = ([self._formats[f"{kind}_cache.{index}"] for index in layers] for kind in _KINDS)
        return list(zip(keys, values, strict=True))

    def forward(self, batch: BlockBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute hidden states or logits in fp32. Returns a view of memory that the next call overwrites."""
        for name in self._small:
            self._give(name, batch.arrays[name])
        if hidden is not None:
            self._give("hidden", hidden.float().contiguous().numpy())
        # Runs in this thread: on a busy machine, switching to another thread and back took as long as the step.
        self._request.infer(share_outputs=True)
        return torch.from_numpy(self._request.get_output_tensor().data)


def _format(port: ov.ConstOutput) -> BlockFormat:
    """Read the block format of a compiled cache input, whose number of blocks is dynamic."""
    _, *shape = port.get_partial_shape()
    return BlockFormat(port.get_element_type().get_type_name(), tuple(size.get_length() for size in shape))
