"""A graph compiled for this CPU, and its one request: small inputs are set each time, caches once a pool.

Owns how OpenVINO is set up. Never decides what is computed.
"""

from __future__ import annotations

from typing import Any, Final

import openvino as ov
import torch
from numpy.typing import NDArray

from engine.errors import OpenVINOError
from engine.model.openvino.batch import BlockBatch, BlockPool
from engine.model.openvino.paging import with_paged_attention
from engine.model.stage_slice import StageFacts

__all__ = ["CompiledStage"]

_PRECISIONS: Final = {torch.float32: ("f32", ov.Type.f32), torch.bfloat16: ("bf16", ov.Type.bf16)}


class CompiledStage:
    """Computes a stage over the pool that it was given last; ``graph`` has marks where attention goes, and is used up.

    Raises OpenVINOError when this CPU cannot.
    """

    def __init__(self, graph: ov.Model, facts: StageFacts) -> None:
        hint, kind = _PRECISIONS[facts.dtype]
        settings = {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # Processes of several stages, or of several servers, would be bound to the same core.
            "ENABLE_CPU_PINNING": False,
        }
        try:
            compiled = ov.Core().compile_model(with_paged_attention(graph, facts), "CPU", settings)
        except RuntimeError as exc:
            raise OpenVINOError(f"OpenVINO {ov.__version__} cannot compile the model for this CPU: {exc}") from exc
        ports = {port.any_name: port for port in compiled.inputs}
        types = {str(port.get_element_type()) for name, port in ports.items() if "_cache." in name}
        if types != {str(kind)}:
            raise OpenVINOError(
                f"OpenVINO must keep the KV in {facts.dtype} here, but takes {', '.join(sorted(types))}"
            )
        self._facts = facts
        self._request = compiled.create_infer_request()
        self._given: dict[str, NDArray[Any]] = {}
        self._caches = [name for name in ports if "_cache." in name]
        self._small = [name for name in ports if "_cache." not in name and name != "hidden"]

    def take_pool(self, pool: BlockPool) -> None:
        """Keep the KV in the caches of a pool from now on."""
        layers: list[tuple[ov.Tensor, ov.Tensor]] = []
        for index, windowed in enumerate(self._facts.windowed):
            own = pool.window if windowed else pool
            assert isinstance(own, BlockPool), "a stage with window layers has a window pool of blocks"
            layers.append(own.caches[self._facts.windowed[:index].count(windowed)])
        for name in self._caches:
            kind, _, index_text = name.partition("_cache.")
            self._request.set_tensor(name, layers[int(index_text)][kind == "value"])

    def forward(self, batch: BlockBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states or logits in fp32; a view of memory that the next call overwrites."""
        given = {name: batch.arrays[name] for name in self._small}
        if hidden is not None:
            given["hidden"] = hidden.float().contiguous().numpy()
        # The request reads the arrays where they lie: they are held until the next call.
        self._given = given
        for name, array in given.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        # Computed in this thread: a hand-over to another one and back took as long as the step on a busy machine.
        self._request.infer(share_outputs=True)
        return torch.from_numpy(self._request.get_output_tensor().data)
