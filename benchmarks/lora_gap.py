"""The longest gap of a stream while a LoRA is loaded, read on the step's thread or beside the computation.

One stage in this process, wall-clock time, the minimum over several alternating rounds. Run: ``python -m
benchmarks.lora_gap``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.machine import print_with_machine
from benchmarks.measurement import in_turn
from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import CacheEvent, CallAnswer, Event, Generate, LoadLora, Reply, SamplingParams, TokenOutput
from engine.core.plan import LoraOrder
from engine.core.scheduler import Scheduler
from engine.core.scheduler.loop import carry_out
from engine.model.checkpoint import read_facts
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from lockstep.interruption import interruptible

SHAPE: Final = "S"
WARM_TOKENS: Final = 32
BYTES: Final = 4


class ReadsInTurn(LocalPipeline):
    """Reads a LoRA on the step's thread."""

    def order_lora(self, order: LoraOrder) -> None:
        if order.path is not None:
            self._note_read(order.version, self._runner.begin_lora(order)())


class Times:
    """An outbox that notes when each token and a call's answer arrive."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.answer: CallAnswer | None = None

    def send(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, CallAnswer):
                self.answer = reply
            elif isinstance(reply, TokenOutput):
                self.tokens.append(time.perf_counter())

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Do nothing: there is no router."""


def write_lora(folder: Path, mib: int) -> int:
    """Write a LoRA of about this size for the shape; return its rank."""
    shape = SHAPES[SHAPE]
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    query, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (query, hidden),
    }
    dense = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    linears = {f"self_attn.{name}": one for name, one in attention.items()} | {
        f"mlp.{k}": one for k, one in dense.items()
    }
    rank: int = mib * 2**20 // (BYTES * layers * sum(map(sum, linears.values())))
    weights = {}
    for layer in range(layers):
        for name, (inputs, outputs) in linears.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(rank, inputs) * 0.01
            weights[f"{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.01
    save_file(weights, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in linears]
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"target_modules": modules}))
    return rank


def longest_gap(pipeline: LocalPipeline, limits: Limits, lora: Path | None) -> tuple[float, float]:
    """Return the longest gap of a stream from the load of a LoRA to its answer, and the median gap before, in ms."""
    scheduler, times = Scheduler(limits), Times()
    events: list[Event] = [
        Generate(
            rid="stream",
            prompt_ids=tuple(range(1, 33)),
            sampling=SamplingParams(max_new_tokens=limits.context_length // 2, temperature=0, ignore_eos=True),
        )
    ]
    begun = 0
    while not begun or (times.answer is None and lora is not None) or len(times.tokens) < begun + WARM_TOKENS:
        carry_out(scheduler.step(events, time.perf_counter()), pipeline, times)
        completion = pipeline.next_completion(0)
        events = [*([] if completion is None else [completion]), *pipeline.answers()]
        if not begun and len(times.tokens) >= WARM_TOKENS:
            begun = len(times.tokens)
            if lora is not None:
                events.append(LoadLora(call_id="load", name="x", path=str(lora)))
    if times.answer is not None and not times.answer.ok:
        raise SystemExit(f"error: the LoRA must load, but: {times.answer.message}")
    gaps = [(b - a) * 1e3 for a, b in pairwise(times.tokens)]
    return max(gaps[begun - 1 :]), sorted(gaps[: begun - 1])[begun // 2]


def main() -> None:
    """Print the longest gap for each way of reading, and without a load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=100, help="the size of the LoRA's file")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = {"no load": LocalPipeline, "on the step's thread": ReadsInTurn, "beside the computation": LocalPipeline}
    least = dict.fromkeys(ways, (float("inf"), float("inf")))
    with tempfile.TemporaryDirectory() as name:
        model, lora = Path(name) / "model", Path(name) / "lora"
        model.mkdir()
        lora.mkdir()
        make_checkpoint(model, "float32", SHAPE)
        rank = write_lora(lora, arguments.mib)
        config = EngineConfig(
            model=str(model), device="cpu", backend="torch", max_loras=1, max_lora_rank=rank, max_total_tokens=8192
        )
        limits = Limits.of(config, read_facts(config))
        for number in range(arguments.rounds):
            for way in in_turn(list(ways), number):
                pipeline = ways[way](StageRunner(config, limits, 0))
                found = longest_gap(pipeline, limits, None if way == "no load" else lora)
                pipeline.close()
                least[way] = min(least[way], found)
    table = Table(f"a LoRA of {arguments.mib} MiB is read", "longest gap", "gap before, p50")
    for way, (longest, usual) in least.items():
        table.add_row(way, f"{longest:,.1f} ms", f"{usual:,.1f} ms")
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.lora_gap"):
        main()
