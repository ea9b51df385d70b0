"""Statistics of an engine: current sizes, and totals since its start."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's sizes and counters at the end of a step.

    ``weights_version`` is 0 for the weights of the start and grows by one with every update. ``alive`` requests have
    not finished, whatever their place; ``pending_prefill_tokens`` must still be launched before all of them decode.
    ``waiting_for_grammar`` counts the waiting requests whose grammar is not compiled yet, ``grammar_hits`` the requests
    whose grammar was known. ``sleep_level`` is 0 while the engine is awake; at 2 it needs an update before it can wake.
    ``loras_resident`` counts the LoRAs that the stages hold, ``lora_loads`` the loads, ``lora_evictions`` the LoRAs
    that made room for others. Of ``cached_tokens``, ``host_hit_tokens`` were found in host memory.
    ``host_pages_cached`` host pages can be hit; host pages that are neither free nor cached are being written.
    ``host_pages_written`` and ``host_pages_loaded`` count copies. ``pages_received`` came from other engines,
    ``pages_sent`` went to them; ``open_transfers`` have not ended.
    """

    step: int
    forward_ct: int
    waiting: int
    chunked: int
    running: int
    in_flight: int
    paused: str | None
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    page_size: int
    rows_total: int
    rows_free: int
    alive: int
    pending_prefill_tokens: int
    sleep_level: int = 0
    loras_resident: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    host_pages_cached: int = 0
    open_transfers: int = 0
    requests_started: int
    requests_finished: int
    requests_aborted: int
    requests_refused: int
    retractions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    weights_version: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests_timed_out: int = 0
    grammars_compiled: int = 0
    grammar_hits: int = 0
    lora_loads: int = 0
    lora_evictions: int = 0
    host_hit_tokens: int = 0
    host_pages_written: int = 0
    host_pages_loaded: int = 0
    pages_received: int = 0
    pages_sent: int = 0
    waiting_for_grammar: int = 0
