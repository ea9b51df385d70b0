"""A gate that makes the forwards of some requests raise, each time, as broken kernels and full devices do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.core.plan import Microbatch
from engine.pipeline.local import LocalPipeline
from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.live_gate import LiveGate

POISON = "poison-"
ERRORS: dict[str, Callable[[], BaseException]] = {
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "MemoryError": lambda: MemoryError("no memory"),
    "RuntimeError": lambda: RuntimeError("a kernel failed"),
    "IndexError": lambda: IndexError("index out of range"),
}


def failing_gate(context: GateContext) -> LiveGate:
    """The live gate over a pipeline that fails a microbatch with a rid such as 'poison-MemoryError' or 'poison-2'."""
    pipeline: Any = context.pipeline
    if isinstance(pipeline, LocalPipeline):
        _fail_in_process(pipeline)
    else:
        _fail_in_stage(pipeline)
    return LiveGate(context)


def _fail_in_process(pipeline: Any) -> None:
    runner = pipeline._runner
    compute = runner._compute

    def compute_or_fail(microbatch: Microbatch, hidden: torch.Tensor | None) -> Any:
        for kind in _poisons(microbatch):
            raise ERRORS[kind]()
        return compute(microbatch, hidden)

    runner._compute = compute_or_fail


def _fail_in_stage(pipeline: Any) -> None:
    launch = pipeline.launch

    def launch_or_fail(microbatch: Microbatch) -> None:
        for stage in _poisons(microbatch):
            pipeline.fail_next_step(int(stage))
        launch(microbatch)

    pipeline.launch = launch_or_fail


def _poisons(microbatch: Microbatch) -> list[str]:
    rids = [segment.rid for segment in microbatch.segments]
    return [rid.removeprefix(POISON).partition(".")[0] for rid in rids if rid.startswith(POISON)]
