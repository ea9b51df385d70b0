"""The script of the demo: flush the cache while a request's last chunk is in flight and every queue is empty.

It runs inside the scheduler process. The registered test of the same race gives its origin.
"""

from __future__ import annotations

from collections.abc import Generator

from engine import EngineConfig
from scripted import ScriptContext, scripted

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@scripted(PP4, tiers=("server", "sim"), must_reach=["the window is open"])
def flush_race(t: ScriptContext) -> Generator[None, None, None]:
    """Start a prompt of two chunks, and flush between the launch of the second and its result."""
    r = t.start_req(rid="r", prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes("the window is open", r.chunks_done == 2 and not r.output_ids)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert "in_flight=" in flush.text
    assert r.finish_reason == "length"
    assert len(r.output_ids) == 2
