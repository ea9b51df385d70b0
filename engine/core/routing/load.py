"""The load that an engine reports to a router or to a decode engine, within the bounds on which its readers rely."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from engine.core.stats import EngineStats

# Sums of a fleet's counts stay exact and fit into 64 bits.
MAX_COUNT: Final = 2**53
MAX_NAME_CHARS: Final = 64
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
SleepLevel = Annotated[int, msgspec.Meta(ge=0, le=2)]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the reply of ``/get_load``: an engine that takes a router's requests, under its own name.

    The first five fields are SGLang's. ``num_reqs`` requests have not finished, ``num_waiting_reqs`` of them are in the
    queue. ``num_pending_tokens`` uncached tokens must be launched before all of them decode; ``num_tokens`` adds the
    tokens that requests hold. ``step`` is the scheduler's step that the numbers describe. ``kv_origin`` is a digest of
    what the engine's KV depends on; empty if it sends none, or after an update of its weights. Routing depends on the
    fields without a default.
    """

    dp_rank: Count = 0
    num_reqs: Count = 0
    num_waiting_reqs: Count
    num_tokens: Count = 0
    num_pending_tokens: Count
    num_running_reqs: Count
    free_pages: Count
    cached_pages: Count
    total_pages: Count = 0
    page_size: Count = 0
    step: Count = 0
    weights_version: Count
    version: Name = ""
    kv_origin: Name = ""
    role: Name
    sleep_level: SleepLevel

    @classmethod
    def of(cls, stats: EngineStats, *, role: str, version: str, kv_origin: str = "") -> Load:
        return cls(
            num_reqs=stats.alive,
            num_waiting_reqs=stats.waiting,
            num_tokens=stats.pages_held * stats.page_size + stats.pending_prefill_tokens,
            num_pending_tokens=stats.pending_prefill_tokens,
            num_running_reqs=stats.alive - stats.waiting,
            free_pages=stats.pages_free,
            cached_pages=stats.pages_cached,
            total_pages=stats.pages_total,
            page_size=stats.page_size,
            step=stats.step,
            weights_version=stats.weights_version,
            version=version,
            kv_origin="" if stats.weights_version else kv_origin,
            role=role,
            sleep_level=stats.sleep_level,
        )
