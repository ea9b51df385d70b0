"""Checks KV events: a mirror built only from them equals the prefix cache and the host tier."""

from __future__ import annotations

import functools

from engine.core.memory import KVMemory
from engine.core.memory.node import KvKey, page_keys
from engine.core.routing.cache_index import CacheMirror
from engine.core.scheduler import StepResult
from scripted.core.violation import Violation


@functools.lru_cache(maxsize=2048)
def _keys_of(tokens: tuple[int, ...], size: int, kv_key: KvKey, after: bytes | None) -> tuple[bytes, ...]:
    return tuple(page_keys(tokens, size, kv_key, after=after))


def check_mirror(mirror: CacheMirror, result: StepResult, memory: KVMemory) -> None:
    """Update the mirror with one step, and compare. Raises Violation."""
    mirror.take(mirror.next, float(result.step), result.cache_events)
    size = memory.pages.page_size
    last: dict[int, bytes | None] = {memory.tree.root.id: None}
    keys: set[bytes] = set()
    for node in memory.tree.nodes():
        assert node.parent is not None
        own = _keys_of(node.tokens, size, node.kv_key, last[node.parent.id])
        last[node.id] = own[-1]
        keys.update(own)
    on_host = {page.key for page in memory.host.kept.values() if page.is_ready} if memory.host is not None else set()
    for where, mirrored, there in (("pool", mirror.pool, keys), ("host", mirror.host, on_host)):
        if mirrored != there:
            raise Violation(
                f"step {result.step}: of the cached pages in the {where} the KV events tell {len(mirrored)}, there are "
                f"{len(there)}: {len(mirrored - there)} are told and not there, "
                f"{len(there - mirrored)} are there and not told"
            )
