"""The pressure verbs of ``t``: exact, effective at once, part of the record, given back, and refused in words."""

from __future__ import annotations

import pytest

from engine import EngineConfig
from engine.core.messages import ReleasePressure, SetPressure
from scripted import BadCall, ScriptedSim

CONFIG = EngineConfig(max_total_tokens=1024, max_running_requests=4, chunked_prefill_size=64)


def run(script) -> None:
    with ScriptedSim.start(CONFIG) as sim:
        sim.run(script)


def test_pressure_holds_at_once_and_is_given_back() -> None:
    """Scripts hold and release what a scheduler meets (D09)."""

    def script(t):
        before = t.state
        t.exhaust_kv(leave_pages=3)
        t.exhaust_rows(leave_rows=1)
        assert (t.state.kv.free, t.state.kv.held, t.state.kv.reserved) == (3, 61, 61)
        assert (t.state.rows.free, t.state.rows.reserved) == (1, 3)
        assert t.engine_stats().pages_held == 61
        yield
        assert t.history[0].events == (SetPressure(leave_pages=3), SetPressure(leave_rows=1))
        assert t.history[0].pages_held == 61
        t.release_exhausted()
        assert (t.state.kv, t.state.rows) == (before.kv, before.rows)
        yield

    run(script)


def test_the_next_script_finds_nothing_exhausted() -> None:
    """D05: given back at reset, in the middle of a pressure that was never released."""

    def exhausts(t):
        t.exhaust_kv(0)
        t.start_req(prompt_len=20)
        yield

    def finds(t):
        assert (t.state.kv.free, t.state.rows.free) == (64, 4)
        yield

    run(exhausts)
    run(finds)


def test_running_request_is_retracted_and_recovers() -> None:
    """B04, D09: the same output, which the oracle compares."""

    def script(t):
        r = t.start_req(prompt_len=60, max_new_tokens=40)
        yield from t.advance_to_decode_step(r, 3)
        t.exhaust_kv(leave_pages=0)
        yield from t.run_until(lambda: r.status == "waiting")
        t.release_exhausted()
        yield from t.run_until_finished(r)
        assert r.retractions == 1

    run(script)


def test_locked_nodes_are_not_evicted() -> None:
    def script(t):
        for seed in range(3):
            r = t.start_req(prompt_len=33, prompt_seed=seed, max_new_tokens=1)
            yield from t.run_until_finished(r)
        yield from t.run_until_idle()
        t.exhaust_locks(leave_unlocked=1)
        assert t.state.tree.nodes - t.state.tree.locked_nodes == 1
        assert t.evict() == 2
        assert t.state.tree.nodes == t.state.tree.locked_nodes == 2
        t.release_exhausted()
        assert t.state.tree.locked_nodes == 0
        assert t.evict(pages=1) == 1
        yield
        assert ReleasePressure() in t.history[-1].events

    run(script)


def test_cache_is_evicted_only_if_it_must_be() -> None:
    def script(t):
        yield from t.warmup_radix(range(40, 120))
        cached = t.state.kv.cached
        assert cached == 5
        t.exhaust_kv(leave_pages=10)
        assert t.state.kv.cached == cached
        t.exhaust_kv(leave_pages=t.state.kv.total - 2)
        assert (t.state.kv.free, t.state.kv.cached) == (62, 2)
        yield

    run(script)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.exhaust_kv(-1), "whole number >= 0, got -1"),
        (lambda t: t.exhaust_kv(65), "at most 64 now"),
        (lambda t: t.exhaust_window(0), "needs a model with window layers, and this one has none"),
        (lambda t: t.exhaust_rows(2.5), "whole number >= 0, got 2.5"),
        (lambda t: t.exhaust_rows(5), "no more rows can be free"),
        (lambda t: t.exhaust_locks(1), "no more nodes can be unlocked"),
        (lambda t: t.evict(1), "0 to 0 pages"),
    ],
)
def test_bad_calls_are_refused_in_words(call, words: str) -> None:
    """D02: nothing is changed by them."""

    def script(t):
        with pytest.raises(BadCall, match=words):
            call(t)
        yield
        assert t.history[0].events == ()

    run(script)
