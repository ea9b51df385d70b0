"""G30: a request for no new token computes its prompt, caches it, and emits nothing.

Goal: it ends with the reason ``length`` and an empty output, for every length of the prompt and beside any other event;
a prompt that fills the pool or the context is admitted. Method: at the boundaries, in a pause, with a failure, beside
decoding requests. Origin: SGLang issue 4892, transformers pull request 28579; B02, B04. Mutants:
prefill-only-says-a-token, failed-prefill-is-cached.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=8, suite="base-cpu")

CHUNK = 32
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
FOUR_PAGES = EngineConfig(page_size=4, max_total_tokens=16)
SHORT_CONTEXT = EngineConfig(context_length=40, chunked_prefill_size=16)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 16, CHUNK, 3 * CHUNK - 3])
@scripted(FOUR_STAGES)
def test_nothing_is_said(t, prompt_len, stream):
    r = t.start_req(prompt_len=prompt_len, max_new_tokens=0, stream=stream)
    yield from t.run_until_finished(r)
    assert (r.finish_reason, r.output_ids) == ("length", [])
    yield from t.run_until_idle()
    assert (r.client.finish_reason, r.client.text, r.client.terminal_answers) == ("length", "", 1)
    # All of it is cached, its last token's page included.
    assert t.state.kv.cached == prompt_len // 16


@scripted(FOUR_STAGES)
def test_what_it_leaves_is_hit(t):
    warm = t.start_req(prompt_len=64, max_new_tokens=0, return_logprob=True, logprob_start_len=0)
    yield from t.run_until_finished(warm)
    assert (len(warm.client.input_logprobs), warm.output_ids) == (64, [])
    r = t.start_req(prompt_len=70, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.cached_tokens == 64


@scripted(FOUR_PAGES)
def test_a_prompt_that_fills_the_pool(t):
    r = t.start_req(prompt_len=16, max_new_tokens=0)
    yield from t.run_until_finished(r)
    assert (r.finish_reason, r.output_ids, t.state.kv.free) == ("length", [], 0)
    with pytest.raises(RequestRefused, match="needs 5 pages"):
        t.start_req(prompt_len=17, max_new_tokens=0)


@scripted(SHORT_CONTEXT)
def test_a_prompt_that_fills_the_context(t):
    r = t.start_req(prompt_len=40, max_new_tokens=0)
    yield from t.run_until_finished(r)
    assert (r.finish_reason, r.output_ids) == ("length", [])
    for prompt_len, new in ((41, 0), (40, 1)):
        with pytest.raises(RequestRefused, match="context_length is 40"):
            t.start_req(prompt_len=prompt_len, max_new_tokens=new)


@scripted(FOUR_STAGES, must_reach=["its last chunk is in flight"])
def test_a_pause_around_its_last_chunk(t):
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=0)
    yield from t.advance_to_stage(r, "last_chunk")
    t.sometimes("its last chunk is in flight", t.state.queues_clear and bool(t.state.in_flight))
    t.pause_generation("retract")
    yield from t.run_until(lambda: not t.state.in_flight)
    # The result of its last chunk ends it, and nothing is left to retract.
    assert (r.finish_reason, r.retractions, r.output_ids) == ("length", 0, [])
    t.continue_generation()
    yield from t.run_until_idle()


@scripted(FOUR_STAGES, must_reach=["a chunk in flight"])
def test_a_pause_in_the_middle_of_it(t):
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=0, return_logprob=True, logprob_start_len=0)
    yield from t.advance_to_nth_chunk(r, 1)
    t.sometimes("a chunk in flight", bool(t.state.in_flight))
    t.pause_generation("retract")
    yield from t.run_until(lambda: r.retractions)
    t.continue_generation()
    yield from t.run_until_finished(r)
    assert (r.finish_reason, r.output_ids) == ("length", [])
    assert len(r.client.input_logprobs) == 3 * CHUNK - 3


@scripted(FOUR_STAGES)
def test_a_failed_one_leaves_nothing(t):
    t.fail_next_step(1)
    r = t.start_req(prompt_len=20, max_new_tokens=0)
    yield from t.run_until_finished(r)
    assert (r.finish_reason, t.state.kv.cached) == ("error", 0)


@scripted(EngineConfig(pp_size=2, mixed_chunk=True, chunked_prefill_size=CHUNK))
def test_beside_requests_that_go_on(t):
    others = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=6) for seed in (1, 2)]
    yield from t.run_until(lambda: others[0].output_ids)
    r = t.start_req(prompt_len=70, max_new_tokens=0)
    yield from t.run_until_all_finished([r, *others])
    assert (r.finish_reason, r.output_ids) == ("length", [])
    assert [len(other.output_ids) for other in others] == [6, 6]
