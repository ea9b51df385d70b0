"""Prompts one and two tokens around a multiple of the chunk.

Goal: prompts are cut at the right token, none is computed twice or left out, and the output equals a run alone. Method:
offsets -2, -1, 1, 2 around one, two and three chunks; look at the segments of every microbatch. Origin: the chunk
boundary tests of SGLang's scripted runtime; B02, B17. Mutants: every-chunk-emits-a-token,
a-whole-prompt-counts-as-a-part, parts-are-not-counted, chunking-cannot-be-switched-off.
"""

import itertools

import pytest
from thinned import thinned

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
ONE_TOKEN = EngineConfig(chunked_prefill_size=1, page_size=1)
UNSPLIT = EngineConfig(chunked_prefill_size=-1, page_size=4)


@pytest.mark.parametrize("offset", thinned([-1, -2, 1, 2], one_in=2))
@scripted(ONE_STAGE)
def test_boundaries_on_one_stage(t, offset):
    yield from _check_boundaries(t, offset)


@pytest.mark.parametrize("offset", thinned([-1, -2, 1, 2], one_in=2))
@scripted(PP4)
def test_boundaries_on_four_stages(t, offset):
    yield from _check_boundaries(t, offset)


@scripted(ONE_TOKEN, tiers=("sim",))
def test_chunks_and_pages_of_one_token(t):
    r = t.start_req(prompt_len=9, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.chunks_done == 9
    assert _cuts(t, r)[:9] == [(i, i + 1) for i in range(9)]


@scripted(UNSPLIT, tiers=("sim",))
def test_chunking_off_never_splits(t):
    r = t.start_req(prompt_len=1000, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.chunks_done == 0
    assert _cuts(t, r)[0] == (0, 1000)


def _check_boundaries(t, offset):
    for chunks in (1, 2, 3):
        length = chunks * CHUNK + offset
        r = t.start_req(prompt_len=length, prompt_seed=chunks, max_new_tokens=3)
        yield from t.run_until_finished(r)
        bounds = [*range(0, length, CHUNK), length]
        expected = list(itertools.pairwise(bounds))
        cuts = _cuts(t, r)
        assert cuts == [*expected, (length, length + 1), (length + 1, length + 2)], f"the prompt was cut into {cuts}"
        assert r.chunks_done == (len(expected) if len(expected) > 1 else 0)
        assert len(r.output_ids) == 3


def _cuts(t, r):
    """The tokens of a request that each microbatch computed, as (start, end)."""
    return [
        (segment.start, segment.start + len(segment.token_ids))
        for step in t.history
        if step.microbatch is not None
        for segment in step.microbatch.segments
        if segment.rid == r.rid
    ]
