"""Packs SGLang's plans in a running server and in a replay, from requests and pools and never from a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripted.sdk.flight.packed import packed_plan


def packed_of(scheduler: Any, batch: Any, number: int, now: float, numbers: Mapping[str, int]) -> bytes:
    """Pack a batch that is about to run. ``numbers`` has the requests' numbers by name.

    Block tables are on the device; the free and evictable parts of the pools stand in for them.
    """
    if batch.forward_mode.is_extend():
        starts, counts = batch.prefix_lens, batch.extend_lens
    else:
        starts, counts = [_length_of(req) - 1 for req in batch.reqs], [1] * len(batch.reqs)
    return packed_plan(
        number,
        now,
        ids=[numbers[req.rid] for req in batch.reqs],
        starts=starts,
        counts=counts,
        tables=_free_in(scheduler),
    )


def samples(batch: Any) -> list[bool]:
    """Return, for each request of a batch, whether it gets a token: it does once its prompt is complete."""
    if not batch.forward_mode.is_extend():
        return [True] * len(batch.reqs)
    return [
        start + count >= _length_of(req)
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    ]


def _length_of(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _free_in(scheduler: Any) -> tuple[int, int, int]:
    return (
        scheduler.token_to_kv_pool_allocator.available_size(),
        scheduler.tree_cache.evictable_size(),
        scheduler.req_to_token_pool.available_size(),
    )
