"""Receivers and the queue: neither keeps the other waiting, and each reserves only the memory that it needs.

Goal: requests start beside one whose KV does not arrive, received prompts go before the queue, a receiver is admitted
when its own pages are free, and tokens computed by another engine are no load of this one. Method: transfers are held
beside a queue that has no row, a prompt that is computed here, and a pool that two receivers fill exactly. Origin:
TensorRT-LLM pull request 13713; vLLM pull requests 42568 and 57841; FastDeploy pull request 8022. Mutants:
a-receiver-blocks-the-queue, received-waits-for-an-empty-queue, receivers-reserve-as-if-they-ran,
load-counts-what-others-compute.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

DECODE = EngineConfig(role="decode", page_size=4, chunked_prefill_size=16, max_total_tokens=256)
HELD = "the KV of one request does not come"
QUEUE = "others wait for a row when the KV comes"
FULL = "a receiver and the prompt after it fill the pool"


@scripted(DECODE, must_reach=[HELD])
def test_others_start_beside_a_receiver(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield
    b = t.start_req(prompt_len=3, prompt_seed=1, max_new_tokens=3)
    c = t.start_req(prompt_len=22, prompt_seed=2, max_new_tokens=3)
    for _ in range(5):
        yield
    t.sometimes(HELD, t.state.transferring == [a.rid, c.rid])
    assert b.finish_reason == "length", "a request waits for the KV of another one"
    t.release_transfers()
    yield from t.run_until_all_finished([a, c])


@scripted(DECODE, must_reach=[QUEUE])
def test_what_was_received_goes_before_the_queue(t):
    t.exhaust_rows(3)
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield
    others = [t.start_req(prompt_len=3, prompt_seed=seed, max_new_tokens=6) for seed in range(1, 7)]
    yield from t.run_until(lambda: len(t.state.running) == 2)
    t.release_transfers()
    t.sometimes(QUEUE, len(t.state.waiting) == 4 and t.state.rows.free == 0)
    yield
    yield
    assert not t.state.transferring, "a request whose KV has come waits for the queue"
    yield from t.run_until_finished(a)
    assert not others[-1].finished
    yield from t.run_until_all_finished(others)


@scripted(DECODE, must_reach=[FULL])
def test_a_receiver_is_admitted_when_its_own_pages_are_there(t):
    t.exhaust_kv(16)
    t.hold_transfers()
    both = [t.start_req(prompt_len=length, prompt_seed=length, max_new_tokens=2) for length in (30, 33)]
    yield
    t.sometimes(FULL, t.state.kv.free == 1)
    assert len(t.state.transferring) == 2, "pages are kept free for a request that runs nothing"
    assert t.state.kv.held - t.state.kv.reserved == 7 + 8
    t.release_transfers()
    yield from t.run_until_all_finished(both)


@scripted(DECODE, must_reach=[HELD])
def test_what_another_engine_computes_is_no_load(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield
    t.sometimes(HELD, t.state.transferring == [a.rid])
    assert t.state.load.pending_prefill_tokens == 2, "what another engine computes counts as load of this one"
    assert (t.state.load.running, t.state.load.waiting) == (1, 0)
    t.release_transfers()
    yield from t.run_until_finished(a)
