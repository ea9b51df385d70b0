"""A view of SGLang's scheduler: a batch's shares, retracted requests, free memory, and the queries of promises."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from scripted.core.promises import CachedPrefix
from scripted.core.violation import Violation
from scripted.sdk import Share

_END = "#"


def inner_name(rid: str, number: int | None = None) -> str:
    """Return a name that is not a prefix of another; with a number it is unique to one request."""
    return f"{rid}{_END}" if number is None else f"{rid}{_END}{number}{_END}"


def rid_of(name: str) -> str:
    return name.partition(_END)[0]


def shares_of(batch: Any, size: int, token: Callable[[Any, int], int] | None = None) -> Iterator[Share]:
    """Yield the shares of a forward pass: rows of the table, written slots, and input tokens.

    ``size`` is the page size. ``token`` returns the token of a request's input; without it, shares have no tokens.
    """
    ends, rows = batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
    counts = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(ends)
    ids, written = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
    if not len(batch.reqs) == len(rows) == len(ends) == len(counts) or not sum(counts) == len(ids) == len(written):
        raise Violation(
            f"a batch has {len(batch.reqs)} requests, {len(rows)} rows, {len(ends)} lengths, {len(counts)} counts "
            f"of {sum(counts)} tokens together, {len(ids)} tokens and {len(written)} slots to write"
        )
    at = 0
    for req, row, end, count in zip(batch.reqs, rows, ends, counts, strict=True):
        start = end - count
        is_decode = batch.forward_mode.is_decode() or any(req is one for one in batch.decoding_reqs or ())
        table = batch.req_to_token_pool.req_to_token[row, :end].tolist()
        if table[start:] != written[at : at + count]:
            raise Violation(
                f"{req.rid} is written to the slots {written[at : at + count]}, but its table has {table[start:]}"
            )
        pages = [slot // size for slot in table[::size]]
        if any(slot != pages[place // size] * size + place % size for place, slot in enumerate(table)):
            raise Violation(f"{req.rid} has a table whose slots do not follow one another in its pages: {table}")
        yield Share(
            rid=rid_of(req.rid),
            start=start,
            count=count,
            block_ids=tuple(pages),
            known_tokens=None if is_decode else len(req.origin_input_ids) + len(req.output_ids),
            token_ids=None if token is None else tuple([token(req, one) for one in ids[at : at + count]]),
        )
        at += count


class Retractions:
    """Finds requests that lost their pages, in any queue."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def begin(self, rid: str) -> None:
        self._counts[rid] = 0

    def forget(self, rid: str) -> None:
        self._counts.pop(rid, None)

    def lost(self, scheduler: Any, batch: Any) -> tuple[str, ...]:
        """Return the requests that lost their pages since the last call."""
        lost = []
        batches = (batch, scheduler.last_batch, scheduler.running_batch)
        for req in (*scheduler.waiting_queue, *(req for one in batches if one is not None for req in one.reqs)):
            rid = rid_of(req.rid)
            if req.retraction_count > self._counts.get(rid, req.retraction_count):
                self._counts[rid] = req.retraction_count
                lost.append(rid)
        return tuple(lost)


def counts_of(scheduler: Any, in_flight: int) -> Mapping[str, int]:
    """Return requests by queue, batches in flight, and free or evictable rows and pages."""
    cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    return {
        "waiting": len(scheduler.waiting_queue),
        "running": len(scheduler.running_batch.reqs),
        "chunked": int(scheduler.chunked_req is not None),
        "in_flight": in_flight,
        "rows_free": len(scheduler.req_to_token_pool.free_slots),
        "blocks_free": (allocator.available_size() + cache.evictable_size()) // scheduler.page_size,
    }


def queries_of(scheduler: Any) -> Mapping[str, Callable[[], object]]:
    """Return the queries that must change nothing, by name. A load report contains its time."""
    cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    keys = [RadixKey(array("q", [*req.origin_input_ids, *req.output_ids])) for req in scheduler.waiting_queue]
    found = {
        "load": lambda: msgspec.structs.replace(scheduler.load_inquirer.get_loads(), timestamp=0),
        "idle": scheduler.is_fully_idle,
        "free": lambda: (allocator.available_size(), scheduler.req_to_token_pool.available_size()),
        "cached": lambda: (cache.evictable_size(), cache.protected_size()),
    }
    if isinstance(cache, UnifiedRadixCache):
        found["hits"] = lambda: [cache.tree_core.match_full_device_prefix(key) for key in keys]
    return found


def cached_in(scheduler: Any) -> Iterator[CachedPrefix]:
    """Yield the pages of each node in a scheduler's prefix tree that the device holds, from the root down."""
    cache, size = scheduler.tree_cache, scheduler.page_size
    if not isinstance(cache, UnifiedRadixCache):
        return
    below: list[tuple[Any, tuple[int, ...]]] = [(cache.tree_core.root_node, ())]
    while below:
        node, before = below.pop()
        for child in node.children.values():
            value = child.component_data[BASE_COMPONENT_TYPE].value
            if value is not None:
                tokens = (*before, *child.key.raw_token_ids())
                pages = tuple([slot // size for slot in value[::size].tolist()])
                below.append((child, tokens))
                yield CachedPrefix(tokens, pages, first=len(before) // size)
