"""Unloading LoRAs: never under a request, wherever it is; refused with the counts, or deferred until it has ended.

Goal: an unload sees requests that wait, are partly computed, are in no queue, decode, or are being retracted; a
deferred unload admits no further requests and gives up in time. Method: an unload at each of these points. Origin:
SGLang issue 8162, Dynamo pull request 11520, vLLM issue 54839; A08. Mutants: unload-ignores-what-is-in-flight,
unload-waits-for-ever, failed-change-of-loras-is-booked, lora-known-by-its-name.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=12, suite="base-cpu")

FOUR_STAGES = EngineConfig(
    pp_size=4, pp_async_depth=2, chunked_prefill_size=64, lora="x=embedded-lora:1,y=embedded-lora:2", max_loras=2
)
CONFIG = FOUR_STAGES.model_copy(update={"pp_size": 1, "pp_async_depth": 0})
IN_NO_QUEUE = "its whole prompt is launched, and every queue is empty"


@scripted(FOUR_STAGES, must_reach=[IN_NO_QUEUE])
def test_an_unload_sees_what_is_in_no_queue(t):
    r = t.start_req(prompt_len=125, max_new_tokens=2, lora="x")
    yield from t.advance_to_stage(r, "last_chunk")
    t.sometimes(IN_NO_QUEUE, not t.state.waiting and not t.state.running and t.state.chunked is None)
    unload = t.unload_lora("x")
    yield
    assert unload.done, "the LoRA was unloaded under a request in flight"
    assert unload.status == 400
    assert "in_flight=2" in unload.text
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


@scripted(CONFIG)
def test_an_unload_is_refused_at_each_point_of_a_life(t):
    for seed, point in enumerate(("waiting", "chunked", "running", "retracted")):
        r = t.start_req(prompt_len=125, prompt_seed=seed, max_new_tokens=4, ignore_eos=True, lora="x")
        if point == "chunked":
            yield from t.advance_to_nth_chunk(r, 1)
        elif point != "waiting":
            yield from t.advance_to_decode_step(r, 1)
        if point == "retracted":
            t.pause_generation("retract")
        unload = t.unload_lora("x")
        yield
        assert (unload.done, unload.status) == (True, 400), f"{point}: the LoRA was unloaded under a request"
        assert "=1" in unload.text
        if point == "retracted":
            t.continue_generation()
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"
        yield from t.run_until_idle()


@scripted(CONFIG)
def test_an_unload_that_may_wait_takes_no_further_requests(t):
    r = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True, lora="x")
    yield from t.advance_to_decode_step(r, 1)
    unload = t.unload_lora("x", timeout_s=5)
    yield
    assert not unload.done
    with pytest.raises(RequestRefused) as refused:
        t.start_req(prompt_len=40, lora="x")
    assert refused.value.status == 404
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"
    yield from t.run_until(lambda: unload.done)
    assert unload.status == 200, unload.text
    assert t.engine_stats().loras_resident == 0
    with pytest.raises(RequestRefused) as refused:
        t.start_req(prompt_len=40, lora="x")
    assert refused.value.status == 404
    again = t.load_lora("x", "embedded-lora:1")
    yield from t.run_until(lambda: again.done)
    same = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True, lora="x")
    yield from t.run_until_finished(same)
    assert same.cached_tokens == 0, "it hit KV of the weights that were unloaded"
    assert same.output_ids == r.output_ids


@scripted(CONFIG)
def test_an_unload_gives_up_in_time(t):
    r = t.start_req(prompt_len=40, max_new_tokens=8, ignore_eos=True, lora="x")
    yield from t.advance_to_decode_step(r, 1)
    first = t.unload_lora("x", timeout_s=1)
    yield
    t.clock.advance(2)
    yield
    assert first.done, "it waited beyond its time"
    assert first.status == 400
    assert "running=1" in first.text
    more = t.start_req(prompt_len=20, max_new_tokens=2, lora="x")
    yield from t.run_until_all_finished([r, more])
    unload = t.unload_lora("nothing")
    yield from t.run_until(lambda: unload.done)
    assert unload.status == 404
    assert "cannot be found" in unload.text
    with pytest.raises(RequestRefused) as refused:
        t.start_req(prompt_len=4, lora="nothing")
    assert refused.value.status == 404
    assert "nothing" in refused.value.body


@scripted(CONFIG)
def test_a_stage_that_cannot_drop_it_leaves_it_there(t):
    r = t.start_req(prompt_len=40, max_new_tokens=2, lora="x")
    yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    t.fail_next_step(0)
    unload = t.unload_lora("x")
    yield from t.run_until(lambda: unload.done)
    assert unload.status == 400
    again = t.start_req(prompt_len=40, max_new_tokens=2, lora="x")
    yield from t.run_until_finished(again)
    assert (again.cached_tokens, again.output_ids) == (32, r.output_ids)
