"""G11: two rids, one the beginning of the other.

Goal: an abort names one request exactly. Method: ``batch_1`` and ``batch_10`` run and wait side by side; abort the
shorter. Origin: SGLang pull request 35936. Mutant: abort-matches-by-prefix.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "both requests run"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_abort_of_the_shorter_rid(t):
    shorter = t.start_req(rid="batch_1", prompt_len=20, max_new_tokens=10)
    longer = t.start_req(rid="batch_10", prompt_len=20, prompt_seed=1, max_new_tokens=10)
    yield from t.advance_to_decode_step(longer, 2)
    t.sometimes(WINDOW, set(t.state.running) == {"batch_1", "batch_10"})
    t.abort(shorter)
    yield from t.run_until_finished(shorter, max_steps=2)
    assert shorter.finish_reason == "abort"
    assert not longer.finished, "batch_10 went down with batch_1"
    yield from t.run_until_finished(longer)
    assert longer.finish_reason == "length"


@scripted(ONE_STAGE)
def test_abort_of_the_longer_rid_and_of_a_beginning(t):
    shorter = t.start_req(rid="batch_1", prompt_len=20, max_new_tokens=10)
    longer = t.start_req(rid="batch_10", prompt_len=20, prompt_seed=1, max_new_tokens=10)
    yield from t.advance_to_decode_step(longer, 2)
    t.abort("batch_")
    t.abort(longer)
    yield from t.run_until_finished(shorter)
    assert longer.finish_reason == "abort"
    assert shorter.finish_reason == "length"
