"""Compares vLLM's prefix cache with its KV events. Standalone tests about events contain this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash


def take_events(said: set[tuple[int, Any]], events: Iterable[Any]) -> None:
    """Apply events to ``said``, the blocks announced as cached, by group and hash."""
    for event in events:
        match event:
            case BlockStored():
                said.update((event.group_idx or 0, one) for one in event.block_hashes)
            case BlockRemoved():
                said.difference_update([(event.group_idx or 0, one) for one in event.block_hashes])
            case AllBlocksCleared():
                said.clear()


def not_cached(coordinator: Any, said: Iterable[tuple[int, Any]] = ()) -> set[tuple[int, Any]]:
    """Return the blocks announced as cached, in ``said`` or in pending events, that are in no pool's cache."""
    there = set(said)
    take_events(there, coordinator.block_pool.kv_event_queue)
    # A group may have a pool with its own cache, as HiSparse's pages in host memory do.
    for pool in (coordinator.block_pool, *(one.block_pool for one in coordinator.single_type_managers)):
        cached = pool.cached_block_hash_to_block._cache  # noqa: SLF001 - vLLM has no other way to list it
        there -= {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in cached}
    return there
