"""Dynamic chunk sizes: parts of a prompt get smaller as its prefix grows, so that the stages stay even.

Goal: every microbatch costs about what the first one costs, never more than a page above it; parts end at page
boundaries, no sliver is left to its own microbatch, and the tokens equal a run with equal parts. Method: a long prompt,
a hit, two prompts in one microbatch; the cost counted from the history. Origin: SGLang pull request 23621, vLLM issue
33914. Mutants: chunks-of-one-size, chunk-leaves-a-sliver, chunk-cost-of-one-prompt-alone.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

PAGE = 16
CHUNK = 128
PARITY = 64
EVEN = EngineConfig(
    pp_size=2, chunked_prefill_size=CHUNK, max_total_tokens=4096, dynamic_chunking=True, chunk_parity_tokens=PARITY
)
SPLIT = "the rest of a prompt and the beginning of another are in one microbatch"


def _cost(segments):
    return sum(len(s.token_ids) * (2 * s.start + len(s.token_ids) + 2 * PARITY) for s in segments)


def _parts(t, r):
    plans = [one.microbatch for one in t.history if one.microbatch is not None and one.microbatch.mode == "prefill"]
    return [len(s.token_ids) for plan in plans for s in plan.segments if s.rid == r.rid]


@scripted(EVEN)
def test_parts_shrink_and_cost_the_same(t):
    r = t.start_req(prompt_len=700, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(r, 2)
    assert t.predicted_chunk(0) == CHUNK
    assert t.predicted_chunk(CHUNK) < CHUNK, "the size of a part does not follow its prefix"
    yield from t.run_until_finished(r)
    parts = _parts(t, r)
    assert sum(parts) == 700
    assert parts[0] == CHUNK
    assert parts[:-1] == sorted(parts[:-1], reverse=True)
    assert parts[1] == t.predicted_chunk(parts[0])
    most = CHUNK * (CHUNK + 2 * PARITY)
    page = PAGE * (2 * 700 + PAGE + 2 * PARITY)
    for one in t.history:
        if one.microbatch is not None and one.microbatch.mode == "prefill":
            assert _cost(one.microbatch.segments) <= most + page
    assert all(part % PAGE == 0 for part in parts[:-1])


@scripted(EVEN)
def test_a_rest_of_less_than_a_page_is_taken_along(t):
    whole = t.predicted_chunk(CHUNK)
    r = t.start_req(prompt_len=CHUNK + whole + PAGE - 1, max_new_tokens=1)
    yield from t.run_until_finished(r)
    assert _parts(t, r) == [CHUNK, whole + PAGE - 1], "a sliver has a microbatch of its own"


@scripted(EVEN, must_reach=[SPLIT])
def test_the_whole_microbatch_is_bounded(t):
    a = t.start_req(prompt_len=CHUNK + 60, max_new_tokens=1)
    b = t.start_req(prompt_len=CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_all_finished([a, b])
    shared = [one.microbatch for one in t.history if one.microbatch is not None and len(one.microbatch.segments) == 2]
    t.sometimes(SPLIT, bool(shared) and shared[0].rids == (a.rid, b.rid))
    most = CHUNK * (CHUNK + 2 * PARITY)
    assert _cost(shared[0].segments) <= most, "each prompt got a whole microbatch's share"


@scripted(EVEN)
def test_a_hit_counts_as_a_prefix(t):
    prefix = list(range(40, 40 + 64)) * 4
    yield from t.warmup_radix(prefix)
    r = t.start_req(prompt_ids=[*prefix, *[33] * 200], max_new_tokens=1)
    yield from t.run_until_finished(r)
    assert r.cached_tokens == len(prefix)
    part, most = _parts(t, r)[0], CHUNK * (CHUNK + 2 * PARITY)
    assert part == t.predicted_chunk(len(prefix))
    costs = [size * (2 * len(prefix) + size + 2 * PARITY) for size in (part, part + PAGE)]
    assert costs[0] <= most < costs[1], "what is cached does not count as a prefix"
