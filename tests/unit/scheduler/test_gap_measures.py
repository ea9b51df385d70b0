"""The times that the gap bound learns from: a microbatch begins when the one before it is back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import PREFILL
from engine.core.scheduler.gap_bound import GapBound

TOKENS = 512


def test_a_microbatch_is_measured_from_the_end_of_the_one_before_it() -> None:
    """At depth 2 both are launched at once; the wait of the second one for the first is none of its time."""
    config = EngineConfig(mixed_chunk=True, max_gap_ms=10_000, pp_async_depth=1, chunked_prefill_size=TOKENS)
    core: Any = SimpleNamespace(limits=Limits.of(config, EMBEDDED_FACTS), now=0.0)
    bound = GapBound(core)
    segments = (SimpleNamespace(token_ids=range(TOKENS), emits=False),)
    launched: Any = SimpleNamespace(time=0.0, microbatch=SimpleNamespace(mode=PREFILL, segments=segments))
    for now in (1.0, 2.0):
        core.now = now
        bound.land(launched, failed=False)
        assert bound.seconds_per_token == 1 / TOKENS
