"""G10: a client goes away while its request runs.

Goal: the request of a client that hung up is gone within two steps, with its memory. Method: a stream of 200 tokens,
disconnect after the third, count steps. Origin: SGLang issue 36333 and pull request 35255; C05. Mutant:
disconnect-aborts-nothing.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "the client went away while its request ran"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_a_client_that_went_away_costs_no_steps(t):
    a = t.start_req(prompt_len=40, max_new_tokens=200)
    b = t.start_req(prompt_len=30, prompt_seed=1, max_new_tokens=12)
    yield from t.advance_to_decode_step(a, 3)
    t.sometimes(WINDOW, a.rid in t.state.running and len(a.client.token_ids) == 3)
    t.disconnect(a)
    yield from t.run_until_finished(a, max_steps=2)
    assert a.finish_reason == "abort"
    assert len(a.output_ids) <= 5
    yield from t.run_until_finished(b)
    assert b.finish_reason == "length"
    yield from t.run_until_idle()
    assert t.state.kv.held == 0


@scripted(ONE_STAGE)
def test_a_client_that_went_away_while_it_waited(t):
    t.pause_generation("in_place")
    a = t.start_req(prompt_len=40, max_new_tokens=200)
    yield
    assert a.status == "waiting"
    t.disconnect(a)
    yield
    assert a.status == "aborted"
    assert t.is_fully_idle
    t.continue_generation()
    yield
