"""The states that Mamba's kernels keep inside a chunk."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from scripted.adapters.vllm.config import VllmSettings


def checkpoint_reader(settings: VllmSettings, scheduler: Any) -> Callable[[int, int], tuple[int, int]] | None:
    """What the kernels of Mamba's layers ask: after how many tokens of a share, and where, a state is kept besides.

    None where they keep none.
    """
    if not settings.mamba_checkpoint_alignment:
        return None
    # It imports kernels.
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    group = scheduler.kv_cache_manager.coordinator.single_type_managers[-1 - len(settings.rings)]

    more: dict[str, Any] = {
        "hash_block_size": settings.hash_block_size,
        "mamba_block_size": settings.states[0],
        "checkpoint_alignment": settings.mamba_checkpoint_alignment,
        "drop_eagle_block": scheduler.use_eagle_block_drop,
        # Since 0.32, and since 0.33: a hash may cover tokens behind its block.
        "cache_hit_alignment_tokens": getattr(group, "cache_hit_alignment_tokens", None),
        "num_hash_lookahead_tokens": getattr(scheduler, "num_hash_lookahead_tokens", None),
    }
    known = inspect.signature(compute_mamba_prefill_checkpoints).parameters
    more = {name: value for name, value in more.items() if name in known}

    def checkpoint_of(start: int, end: int) -> tuple[int, int]:
        (count,), (place,) = compute_mamba_prefill_checkpoints([end], [end - start], **more)
        return count, place

    return checkpoint_of
