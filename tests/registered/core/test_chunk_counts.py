"""Chunk flags and counts of a prompt.

Goal: ``chunks_done`` is 0 for a prompt that fits one pass and counts every part, the tail included, of one that does
not; the flags and the remaining tokens agree with it step by step. Method: prompts of one, two and five chunks on one
stage. Origin: the core contracts of SGLang's scripted runtime; B02. Mutants: every-chunk-emits-a-token,
pause-does-not-stop-launches.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)


@pytest.mark.parametrize(("prompt_len", "chunks"), [(CHUNK - 4, 0), (CHUNK, 0), (CHUNK + 1, 2), (5 * CHUNK - 3, 5)])
@scripted(ONE_STAGE)
def test_chunks_done(t, prompt_len, chunks):
    r = t.start_req(prompt_len=prompt_len, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.chunks_done == chunks
    assert r.remaining_prompt_tokens == 0
    assert not r.is_chunking


@scripted(ONE_STAGE)
def test_flags_follow_the_chunks(t):
    r = t.start_req(prompt_len=5 * CHUNK - 3, max_new_tokens=2)
    assert r.remaining_prompt_tokens == 5 * CHUNK - 3
    for chunk in range(1, 5):
        yield
        assert r.chunks_done == chunk
        assert r.is_chunking
        assert t.is_chunking(r.rid)
        assert t.state.chunked == r.rid
        assert r.remaining_prompt_tokens == t.remaining_prompt_tokens(r.rid) == 5 * CHUNK - 3 - chunk * CHUNK
    yield
    assert r.chunks_done == 5
    assert not r.is_chunking
    assert t.state.chunked is None
    assert r.remaining_prompt_tokens == 0
    assert r.output_ids == ()
    yield from t.run_until_finished(r)


@scripted(ONE_STAGE)
def test_only_one_request_is_partly_prefilled(t):
    requests = [t.start_req(prompt_len=3 * CHUNK - 3, prompt_seed=i, max_new_tokens=2) for i in range(3)]
    while not all(r.finished for r in requests):
        yield
        assert sum(r.is_chunking for r in requests) <= 1
    assert all(r.chunks_done in (3, 4) for r in requests)


@scripted(ONE_STAGE)
def test_chunks_survive_a_retraction(t):
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=2)
    yield from t.advance_to_nth_chunk(r, 2)
    t.pause_generation("retract")
    yield
    assert r.status == "waiting"
    assert r.chunks_done == 2
    assert r.remaining_prompt_tokens == 3 * CHUNK - 3
    t.continue_generation()
    yield from t.run_until_finished(r)
    # Two parts were confirmed and are still cached; the rest is one pass.
    assert r.chunks_done == 2
    computed = [s for record in t.history if record.microbatch for s in record.microbatch.segments if s.sampling]
    assert [segment.start for segment in computed] == [0, 2 * CHUNK]


@scripted(ONE_STAGE)
def test_parks_of_a_partly_prefilled_request_are_counted(t):
    """Steps in a row that launch none of it are one park: in a pause, without pages, with results held."""
    r = t.start_req(prompt_len=6 * CHUNK, max_new_tokens=2)
    yield
    assert (r.is_chunking, r.chunked_parks) == (True, 0)
    t.pause_generation("in_place")
    for _ in range(3):
        yield
        assert (r.is_chunking, r.chunks_done, r.chunked_parks) == (True, 1, 1)
    t.continue_generation()
    yield
    assert (r.chunks_done, r.chunked_parks) == (2, 1)
    t.exhaust_kv(leave_pages=0)
    for _ in range(2):
        yield
        assert (r.is_chunking, r.chunks_done, r.chunked_parks) == (True, 2, 2)
    t.release_exhausted()
    yield
    assert (r.chunks_done, r.chunked_parks) == (3, 2)
    t.hold_results()
    for _ in range(3):
        yield
    assert (r.is_chunking, r.chunked_parks) == (True, 3)
    t.release_results()
    yield from t.run_until_finished(r)
    assert (r.chunks_done, r.chunked_parks) == (6, 3)
