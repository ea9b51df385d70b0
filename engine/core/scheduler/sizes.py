"""Sizes at the end of a step, for the digest and the statistics, and the load.

Counted on demand, so that they cannot drift. Changes nothing.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Final

from engine.core.memory import KVMemory
from engine.core.scheduler.books import Books
from engine.core.scheduler.core import Core
from engine.core.scheduler.counters import Counters
from engine.core.stats import EngineStats

_COUNTERS: Final = tuple(field.name for field in fields(Counters))
_counted: Final = attrgetter(*_COUNTERS)


def sizes_of(core: Core) -> tuple[int, ...]:
    """Return the sizes: waiting, running, in flight; pages free and cached; rows free; then the features' own."""
    books, memory = core.books, core.memory
    sizes: tuple[int, ...] = (
        len(books.waiting),
        len(books.running),
        len(books.in_flight),
        memory.pages.free,
        memory.pages.cached,
        memory.rows.free,
    )
    for feature in core.hooks.sizes:
        sizes += feature.sizes()
    return sizes


def stats_of(core: Core) -> EngineStats:
    books, memory = core.books, core.memory
    pages, rows = memory.pages, memory.rows
    of_features: dict[str, int] = {}
    for feature in core.hooks.stats:
        of_features |= feature.stats()
    return EngineStats(
        step=core.step_number,
        waiting=len(books.waiting),
        chunked=int(books.chunked is not None),
        running=len(books.running),
        in_flight=len(books.in_flight),
        paused=books.paused,
        pages_total=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_held=pages.total - pages.free - pages.cached,
        page_size=pages.page_size,
        rows_total=rows.total,
        rows_free=rows.free,
        alive=len(books.requests),
        pending_prefill_tokens=pending_prefill_tokens(books, memory),
        **of_features,
        **dict(zip(_COUNTERS, _counted(core.counters), strict=True)),
    )


def pending_prefill_tokens(books: Books, memory: KVMemory) -> int:
    """Return the load for a router: the tokens that must still be launched before every request decodes.

    Tokens that the cache could serve now do not count. The output of a retracted request does, because it is recomputed
    with the prompt.
    """
    chunked = books.chunked
    rest = 0 if chunked is None else chunked.prefill_tokens - chunked.planned_tokens
    rest += sum([one.prefill_tokens - one.planned_tokens for one in books.transferring.values()])
    if not books.waiting:
        return rest
    return rest + sum(
        [len(one.ids) - memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key) for one in books.waiting]
    )
