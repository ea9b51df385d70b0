"""The scheduler's counters: requests, tokens, forward passes, and the counts of features. Counters only grow."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.messages import ABORT, TIMEOUT, FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was created. ``forward_ct`` counts launched microbatches and names the next one."""

    forward_ct: int = 0
    requests_started: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_refused: int = 0
    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    weights_version: int = 0
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

    def count_end(self, reason: FinishReason) -> None:
        """Count a terminal reply; aborts and timeouts are counted apart from all others."""
        if reason is ABORT:
            self.requests_aborted += 1
        elif reason is TIMEOUT:
            self.requests_timed_out += 1
        else:
            self.requests_finished += 1
