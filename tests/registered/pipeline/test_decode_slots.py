"""Decodes in a pipeline of several stages.

Goal: a running request is in at most one microbatch in flight, the decodes of several are spread over the stages, take
turns if there is not room for all, and none stalls beside a long prompt. Method: inspect the microbatches in flight
after every step. Origin: B10, B12 and the pipeline's own rule. Mutants: decode-runs-twice, one-big-decode-batch,
decodes-do-not-take-turns, chunks-keep-decodes-out.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
MIXED = EngineConfig(mixed_chunk=True, chunked_prefill_size=8, page_size=4)
BESIDE = "a prompt leaves room for four of six decodes"
LONG = "one stream decodes beside eight chunks of a prompt"
WINDOW = "four decode microbatches in flight at once"


@scripted(PP4, must_reach=[WINDOW])
def test_a_running_request_is_in_one_microbatch(t):
    requests = [t.start_req(prompt_len=12, prompt_seed=i, max_new_tokens=8) for i in range(8)]
    while not all(r.finished for r in requests):
        yield
        flying = [rid for microbatch in t.state.in_flight for rid in microbatch.rids]
        twice = {rid for rid in flying if flying.count(rid) > 1}
        assert not twice, f"{twice} is in two microbatches in flight"
        t.sometimes(WINDOW, [m.mode for m in t.state.in_flight].count("decode") >= 4)
    assert all(len(r.output_ids) == 8 for r in requests)


@scripted(MIXED, must_reach=[BESIDE])
def test_decodes_beside_prompts_take_turns(t):
    """B10: who decodes beside a stream of prompts does not depend on who began first."""
    requests = [t.start_req(prompt_len=4, prompt_seed=i, max_new_tokens=40) for i in range(6)]
    yield from t.run_until(lambda: all(r.output_ids for r in requests))
    before = [len(r.output_ids) for r in requests]
    for i in range(9):
        t.start_req(prompt_len=30, prompt_seed=20 + i, max_new_tokens=1)
        yield
        launched = t.history[-1].microbatch
        t.sometimes(BESIDE, launched.mode == "mixed" and len(launched.segments) == 5)
    gained = [len(r.output_ids) - count for r, count in zip(requests, before, strict=True)]
    assert max(gained) - min(gained) <= 1, f"some decode and others wait: {gained}"
    yield from t.run_until_all_finished(requests)


@scripted(MIXED, must_reach=[LONG])
def test_a_stream_does_not_stall_beside_a_long_prompt(t):
    """B10: with mixed_chunk a running request gets a token with every chunk of another one's prompt."""
    stream = t.start_req(prompt_len=4, max_new_tokens=30)
    yield from t.advance_to_decode_step(stream, 1)
    long = t.start_req(prompt_len=7 * 8 - 3, prompt_seed=1, max_new_tokens=2)
    beside = 0
    while not long.output_ids:
        before = len(stream.output_ids)
        yield
        gained = len(stream.output_ids) - before
        beside += long.is_chunking and gained
        assert gained == 1, f"the stream stalls after {before} tokens, with {long.remaining_prompt_tokens} to prefill"
    t.sometimes(LONG, beside >= 7)
    yield from t.run_until_all_finished([stream, long])
