"""Comparison with transformers' continuous batching: the same prompts on the same device, in turns, without a server.

Preparations for a batch (caches, graphs) are not timed for either engine.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting
from benchmarks.measurement import in_turn

__all__ = ["measure_beside"]

# Each engine's share of the free memory, so that all have room.
_THEIR_SHARE: Final = 0.3
_FEW_BLOCKS: Final = 8
_THEIRS: Final = "transformers, generate_batch"


def measure_beside(setting: Setting) -> list[Table]:
    """Measure output tokens a second of whole batches, prompts included, and the ratio of ours to theirs by round."""
    transformers.utils.logging.disable_progress_bar()
    engines = {
        "lockstep": setting.engine(attention_backend="varlen"),
        "lockstep, graphs": setting.engine(attention_backend="varlen", cuda_graphs="on"),
    }
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        setting.folder, dtype=getattr(torch, setting.dtype), attn_implementation="sdpa"
    )
    model = model.to(setting.device).eval()
    names = [*engines, _THEIRS]
    table = Table(title="", columns=("batch", *names, *[f"{name} to theirs" for name in engines]))
    for rows in setting.batches:
        rates: dict[str, list[float]] = {name: [] for name in names}
        # The first round is not counted: it compiles shapes and records graphs.
        for number in range(setting.rounds + 1):
            prompts = setting.prompts(rows, setting.prompt_tokens, 100 * rows + number)
            for name in in_turn(names, number):
                seconds = (
                    _theirs(model, setting, prompts)
                    if name == _THEIRS
                    else engines[name].run(prompts, setting.new_tokens).seconds
                )
                if number:
                    rates[name].append(rows * setting.new_tokens / seconds)
        model.destroy_cached_continuous_batching_manager()
        ratios = [
            statistics.median(ours / theirs for ours, theirs in zip(rates[name], rates[_THEIRS], strict=True))
            for name in engines
        ]
        table.rows.append((rows, *[statistics.median(rates[name]) for name in names], *ratios))
    attention = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    table.title = f"Output tokens a second; transformers {transformers.__version__} attends by {attention}"
    return [table]


def _theirs(model: Any, setting: Setting, prompts: list[list[int]]) -> float:
    """Return the seconds of one batch. Raises RuntimeError unless every request gave all its tokens."""
    generation = GenerationConfig(max_new_tokens=setting.new_tokens, do_sample=False, eos_token_id=-1)
    # A dry run sets the number of blocks, because a share of this machine's memory would take long to fill.
    room = {"num_blocks": _FEW_BLOCKS} if setting.dry_run else {"max_memory_percent": _THEIR_SHARE}
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **room)
    began = time.perf_counter()
    results = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, persistent_manager=True
    )
    seconds = time.perf_counter() - began
    counts = [len(result.generated_tokens) for result in results.values()]
    if counts != [setting.new_tokens] * len(prompts):
        raise RuntimeError(f"{len(prompts)} requests must give {setting.new_tokens} tokens each, got {counts}")
    return seconds
