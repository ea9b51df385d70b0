"""What subscribers to KV events of vLLM know: which blocks are said to be in the prefix cache, and whether they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, NullEventPublisher
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from scripted.sdk import Violation


class Subscriber(NullEventPublisher):  # type: ignore[misc] # vLLM is not there for mypy
    """In the place of vLLM's publisher. ``said`` are the blocks, by group and hash, as of the events that came."""

    def __init__(self) -> None:
        self.said: set[tuple[int, Any]] = set()

    def publish(self, events: Any) -> None:
        _take(self.said, events.events)

    def check(self, pool: Any) -> None:
        """With the events that are on their way, nothing is said to be cached that is not. Raises Violation."""
        said = set(self.said)
        _take(said, pool.kv_event_queue)
        cached = pool.cached_block_hash_to_block._cache  # noqa: SLF001 - it has no other way to be listed
        missing = said - {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in cached}
        if missing:
            groups = sorted({group for group, _ in missing})
            raise Violation(
                f"KV events say that {len(missing)} blocks of group {', '.join(map(str, groups))} are in the prefix "
                "cache, which are not"
            )


def _take(said: set[tuple[int, Any]], events: Iterable[Any]) -> None:
    for event in events:
        match event:
            case BlockStored():
                said.update((event.group_idx or 0, one) for one in event.block_hashes)
            case BlockRemoved():
                said.difference_update([(event.group_idx or 0, one) for one in event.block_hashes])
            case AllBlocksCleared():
                said.clear()
