"""The sizes of everything at the end of a step: for the digest of the step, and for the statistics; and the load.

Counted when it is asked for, so that no event can make it drift. It only looks.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Final

from engine.core.memory import KVMemory
from engine.core.scheduler.books import Books
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.grammars import Grammars
from engine.core.stats import EngineStats

_COUNTERS: Final = tuple(field.name for field in fields(Counters))
_counted: Final = attrgetter(*_COUNTERS)


def sizes_of(books: Books, memory: KVMemory) -> tuple[int, ...]:
    """Waiting, running, in flight; pages free and cached; rows free; then, where there are any, window pages free and
    cached, and host pages free and ready.
    """
    pages = memory.pages
    sizes: tuple[int, ...] = (
        len(books.waiting),
        len(books.running),
        len(books.in_flight),
        pages.free,
        pages.cached,
        memory.rows.free,
    )
    window, host = memory.sliding_window, memory.host
    if window is not None:
        sizes = (*sizes, window.pages.free, window.pages.cached)
    return sizes if host is None else (*sizes, host.pages.free, host.pages.cached)


def stats_of(
    step: int, counters: Counters, books: Books, memory: KVMemory, grammars: Grammars, loras_resident: int
) -> EngineStats:
    pages, rows, host = memory.pages, memory.rows, memory.host
    return EngineStats(
        step=step,
        waiting=len(books.waiting),
        chunked=int(books.chunked is not None),
        running=len(books.running),
        in_flight=len(books.in_flight),
        paused=books.paused,
        sleep_level=books.sleep_level,
        pages_total=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_held=pages.total - pages.free - pages.cached,
        page_size=pages.page_size,
        rows_total=rows.total,
        rows_free=rows.free,
        alive=len(books.requests),
        pending_prefill_tokens=pending_prefill_tokens(books, memory),
        waiting_for_grammar=grammars.waiting,
        loras_resident=loras_resident,
        host_pages_total=0 if host is None else host.pages.total,
        host_pages_free=0 if host is None else host.pages.free,
        host_pages_cached=0 if host is None else host.pages.cached,
        open_transfers=books.open_transfers,
        **dict(zip(_COUNTERS, _counted(counters), strict=True)),
    )


def pending_prefill_tokens(books: Books, memory: KVMemory) -> int:
    """The load, as a router asks for it: tokens that must still be launched before every request decodes.

    What the cache could serve now is not counted. Of a request that was sent back to the queue its output counts as
    well: it is computed again with the prompt.
    """
    chunked = books.chunked
    rest = 0 if chunked is None else chunked.prefill_tokens - chunked.planned_tokens
    rest += sum([one.prefill_tokens - one.planned_tokens for one in books.transferring.values()])
    if not books.waiting:
        return rest
    return rest + sum(
        [len(one.ids) - memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key) for one in books.waiting]
    )
