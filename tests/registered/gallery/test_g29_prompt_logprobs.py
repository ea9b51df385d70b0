"""G29: the logprobs of a prompt, of every token that was asked for, once and in order.

Goal: chunks, cached prefixes, retractions and other requests of a microbatch take nothing from them and add nothing.
Method: each of these at its worst moment; the client's list is complete, and the oracle compares its values with those
of the request alone. Origin: vLLM issues 3251 and 8268, pull requests 4055, 4139 and 41411; SGLang issue 36938; B02,
B04, B06. Mutants: prompt-logprobs-skip-the-cached, prompt-logprobs-of-another, prompt-logprobs-lost-with-the-batch,
prompt-logprobs-end-with-the-chunk.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

CHUNK = 32
PROMPT = 3 * CHUNK - 3
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
GUESSING = EngineConfig(
    speculative_algorithm="ngram", speculative_ngram_min=1, page_size=4, chunked_prefill_size=CHUNK, mixed_chunk=True
)
RAGGED = EngineConfig(pp_size=2, pp_async_depth=1, mixed_chunk=True, chunked_prefill_size=21)


def score(t, prompt_len=PROMPT, *, start=0, **details):
    return t.start_req(prompt_len=prompt_len, return_logprob=True, logprob_start_len=start, **details)


def assert_complete(r, start=0):
    """Check that each token after ``start`` has a value, but not ``start``, whose logits were not asked for."""
    told = r.client.input_logprobs
    count = len(r.prompt_ids) - start
    assert len(told) == count, f"{len(told)} logprobs for {count} tokens of the prompt"
    assert told[0] is None
    assert None not in told[1:]
    assert len(r.prompt_logprobs) == len(told) - 1


@pytest.mark.parametrize("start", [0, 1, CHUNK - 1, CHUNK, PROMPT - 2, PROMPT - 1])
@scripted(FOUR_STAGES)
def test_every_token_of_a_split_prompt(t, start):
    r = score(t, start=start, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert_complete(r, start)
    assert len(r.client.token_ids) == 2


@scripted(RAGGED, must_reach=["a chunk beside decodes"])
def test_chunks_of_odd_length_beside_decodes(t):
    others = [score(t, 10, prompt_seed=seed, max_new_tokens=12) for seed in range(1, 7)]
    yield from t.run_until(lambda: all(other.output_ids for other in others))
    r = score(t, 70, start=5, max_new_tokens=2, stream=False)
    while not r.finished:
        yield
        composition = t.batch_composition()
        t.sometimes("a chunk beside decodes", r.rid in composition["prefill"] and composition["decode"])
    assert_complete(r, 5)
    yield from t.run_until_all_finished(others)
    for other in others:
        assert_complete(other)


@scripted(GUESSING, must_reach=["beside guesses"])
def test_beside_guesses(t):
    few = {33: 60.0, 34: 60.0, 35: 60.0}
    other = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=60, logit_bias=few)
    yield from t.run_until(lambda: any(batch.drafts for batch in t.state.in_flight))
    r = score(t, max_new_tokens=8, logit_bias=few)
    while not r.finished:
        yield
        flights = t.state.in_flight
        t.sometimes("beside guesses", any(batch.drafts and r.rid in batch.rids for batch in flights))
    assert_complete(r)
    yield from t.run_until_finished(other)


@scripted(ONE_STAGE, must_reach=["most of the prompt is cached"])
def test_a_cached_prefix(t):
    warm = t.start_req(prompt_len=PROMPT, max_new_tokens=1)
    yield from t.run_until_finished(warm)
    t.sometimes("most of the prompt is cached", t.scheduler.memory.tree.match_length(warm.prompt_ids) >= 80)
    whole, part, last = score(t), score(t, start=50), score(t, start=PROMPT - 1)
    yield from t.run_until_all_finished([whole, part, last])
    assert [r.cached_tokens for r in (whole, part, last)] == [0, 48, 80]
    assert_complete(whole)
    assert_complete(part, 50)
    assert_complete(last, PROMPT - 1)
    assert whole.prompt_logprobs[50:] == part.prompt_logprobs


@scripted(FOUR_STAGES, must_reach=["several chunks in flight"])
def test_a_retraction_in_the_middle_of_the_prompt(t):
    r = score(t, start=3, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(r, 2)
    t.sometimes("several chunks in flight", len(t.state.in_flight) == 2)
    t.pause_generation("retract")
    yield from t.run_until(lambda: r.retractions)
    told = r.prompt_logprobs
    assert len(told) == 2 * CHUNK - 3, "a part of the prompt is lost"
    t.continue_generation()
    yield from t.run_until_finished(r)
    assert r.prompt_logprobs[: len(told)] == told
    assert_complete(r, 3)


@scripted(ONE_STAGE, must_reach=["it had said something"])
def test_a_retraction_after_the_prompt(t):
    r = score(t, max_new_tokens=6)
    yield from t.advance_to_decode_step(r, 3)
    t.sometimes("it had said something", len(r.output_ids) == 3)
    t.pause_generation("retract")
    yield from t.run_until(lambda: r.retractions)
    t.continue_generation()
    yield from t.run_until_finished(r)
    assert_complete(r)
    assert len(r.client.token_ids) == 6


@scripted(FOUR_STAGES, must_reach=["both in one microbatch"])
def test_an_abort_beside_another_prompt(t):
    gone, stays = score(t, 12, prompt_seed=1), score(t, 17, prompt_seed=2)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes("both in one microbatch", t.state.in_flight[0].rids == [gone.rid, stays.rid])
    t.abort(gone)
    yield from t.run_until_all_finished([gone, stays])
    assert not gone.prompt_logprobs
    assert_complete(stays)
