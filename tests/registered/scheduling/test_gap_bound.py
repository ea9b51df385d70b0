"""Gaps: how long running requests wait for others' prompts is bounded in time, by what earlier steps took.

Goal: beside a running request a prompt is computed in smaller parts when steps take long, in larger ones when they get
faster, always at least a page; without a running request, and before anything was measured, in whole chunks. In steps
of decodes the bound follows their number, and a quarter of a chunk always fits. Large microbatches are filled to
whole tiles of 64 tokens, decodes included. Method: the clock is advanced by hand
while a microbatch is in flight.
Mutants: gaps-are-not-bounded, gap-bound-holds-for-prompts-alone, gap-bound-never-learns-again,
gap-bound-counts-the-wait, gap-bound-forgets-the-decodes, gap-bound-splits-into-pages,
gap-bound-ignores-tiles, gap-bound-begins-unbounded, gap-bound-splits-unnoticed-steps.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

CHUNK = 128
GAPS = EngineConfig(mixed_chunk=True, chunked_prefill_size=CHUNK, max_gap_ms=100, max_total_tokens=4096)
BOUNDED = "a part of a prompt beside a decode is smaller than a chunk"
PER_TOKEN_S = 0.003
# One decode and two pages take 99 ms; three pages would take more than 100.
PART = 32
STEPS = 4
IN_STEPS = EngineConfig(mixed_chunk=True, chunked_prefill_size=CHUNK, max_gap_steps=STEPS, max_total_tokens=8192)
FIXED_S = 20 * PER_TOKEN_S
TILE = 64
ALIGNED = "a microbatch of decodes and prompts has whole tiles"
IN_TILES = EngineConfig(mixed_chunk=True, chunked_prefill_size=512, max_gap_steps=STEPS, max_total_tokens=8192)


def _parts(t, r, size):
    """Sizes of the parts of a prompt of ``size`` tokens, in order."""
    plans = [one.microbatch for one in t.history if one.microbatch is not None]
    return [len(s.token_ids) for plan in plans for s in plan.segments if s.rid == r.rid and s.start < size]


def _run_at(t, seconds_per_token, steps, fixed_s=0.0):
    """Run steps, each microbatch taking this long for a token, and ``fixed_s`` once."""
    for _ in range(steps):
        plan = t.history[-1].microbatch
        if plan is not None:
            t.clock.advance(fixed_s + seconds_per_token * sum(len(s.token_ids) for s in plan.segments))
        yield


@scripted(GAPS, must_reach=[BOUNDED])
def test_parts_beside_a_decode_take_no_longer_than_the_bound(t):
    stream = t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)
    yield
    yield from _run_at(t, PER_TOKEN_S, 3)
    long = t.start_req(prompt_len=4 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 6)
    parts = _parts(t, long, 4 * CHUNK)
    t.sometimes(BOUNDED, len(parts) >= 4 and parts[1] < CHUNK)
    assert parts[:4] == [PART] * 4, "the part is not what takes the time that a stream may wait"
    mixed = [one.microbatch for one in t.history if one.microbatch is not None and len(one.microbatch.segments) == 2]
    assert all(stream.rid in plan.rids for plan in mixed)
    yield from _run_at(t, PER_TOKEN_S / 3, 8)
    assert max(_parts(t, long, 4 * CHUNK)) > PART, "the engine got faster, and the parts stay small"
    yield from t.run_until_all_finished([stream, long])
    assert sum(_parts(t, long, 4 * CHUNK)) == 4 * CHUNK


@scripted(GAPS)
def test_a_slow_engine_computes_a_page(t):
    stream = t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)
    yield
    yield from _run_at(t, 1, 3)
    long = t.start_req(prompt_len=CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, 1, 3)
    assert _parts(t, long, CHUNK) == [16] * 3
    yield from t.run_until_all_finished([stream, long])


@scripted(GAPS)
def test_a_prompt_alone_is_computed_in_chunks(t):
    first = t.start_req(prompt_len=CHUNK, max_new_tokens=1)
    yield
    yield from _run_at(t, PER_TOKEN_S, 6)
    assert first.finished
    long = t.start_req(prompt_len=2 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 4)
    assert _parts(t, long, 2 * CHUNK) == [CHUNK, CHUNK], "nobody waits, and the parts are small"
    yield from t.run_until_finished(long)


@scripted(GAPS)
def test_the_time_between_microbatches_is_not_measured(t):
    first = t.start_req(prompt_len=CHUNK, max_new_tokens=1)
    yield from t.run_until_finished(first)
    t.clock.advance(60)
    yield
    stream = t.start_req(prompt_len=CHUNK, prompt_seed=2, max_new_tokens=200, ignore_eos=True)
    yield
    yield from _run_at(t, PER_TOKEN_S, 3)
    long = t.start_req(prompt_len=CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 2)
    assert _parts(t, long, CHUNK)[0] == PART, "the time in which nothing was in flight counts"
    yield from t.run_until_all_finished([stream, long])


@scripted(IN_STEPS, must_reach=[BOUNDED])
def test_a_gap_is_some_steps_of_the_decodes_alone(t):
    """Beside one decode a part takes as long as four steps of it; beside eight more, those steps take longer."""
    streams = [t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)]
    yield
    yield from _run_at(t, PER_TOKEN_S, 6, FIXED_S)
    first = t.start_req(prompt_len=3 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 5, FIXED_S)
    beside_one = _parts(t, first, 3 * CHUNK)[:3]
    t.sometimes(BOUNDED, max(beside_one) < CHUNK)
    alone = FIXED_S + PER_TOKEN_S
    assert all(FIXED_S + PER_TOKEN_S * (part + 1) <= 1.1 * STEPS * alone for part in beside_one)
    yield from _run_at(t, PER_TOKEN_S, 6, FIXED_S)
    streams += [t.start_req(prompt_len=2, prompt_seed=n, max_new_tokens=200, ignore_eos=True) for n in range(2, 10)]
    yield from _run_at(t, PER_TOKEN_S, 1, FIXED_S)
    second = t.start_req(prompt_len=3 * CHUNK, prompt_seed=20, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 4, FIXED_S)
    assert _parts(t, second, 3 * CHUNK)[0] > max(beside_one), "beside more decodes the parts are as small"
    yield from t.run_until_all_finished([*streams, first, second])


@scripted(IN_STEPS)
def test_a_bound_in_steps_leaves_a_quarter_of_a_chunk(t):
    """Four steps of one decode take as long as four tokens; smaller parts would mostly read their prefix again."""
    stream = t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)
    yield
    yield from _run_at(t, PER_TOKEN_S, 6)
    long = t.start_req(prompt_len=2 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 5)
    assert _parts(t, long, 2 * CHUNK)[:4] == [CHUNK // 4] * 4, "the parts are smaller than a quarter of a chunk"
    yield from t.run_until_all_finished([stream, long])


@scripted(IN_STEPS, must_reach=[BOUNDED])
def test_before_decodes_are_measured_a_part_beside_one_is_a_quarter_of_a_chunk(t):
    """A burst on a fresh server: its first stream must not wait for all other prompts."""
    stream = t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)
    yield
    long = t.start_req(prompt_len=2 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 5)
    t.sometimes(BOUNDED, any(set(one.microbatch.rids) == {stream.rid, long.rid} for one in t.history if one.microbatch))
    assert max(_parts(t, long, 2 * CHUNK)) <= CHUNK // 4, "nothing is bounded before decodes are measured"
    yield from t.run_until_all_finished([stream, long])


@scripted(IN_TILES, must_reach=[ALIGNED])
def test_decodes_and_prompts_fill_whole_tiles(t):
    """A quarter of the chunk is two tiles: beside three decodes a part is three tokens smaller."""
    streams = [t.start_req(prompt_len=8, prompt_seed=n, max_new_tokens=200, ignore_eos=True) for n in range(3)]
    yield
    yield from _run_at(t, PER_TOKEN_S, 3)
    measured = t.start_req(prompt_len=512, prompt_seed=10, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 5)
    long = t.start_req(prompt_len=1024, prompt_seed=11, max_new_tokens=1)
    yield from _run_at(t, PER_TOKEN_S, 4)
    plans = [one.microbatch for one in t.history if one.microbatch is not None and long.rid in one.microbatch.rids]
    sizes = [sum(len(segment.token_ids) for segment in plan.segments) for plan in plans]
    t.sometimes(ALIGNED, len(sizes) >= 3 and {one.rid for one in streams} <= set(plans[0].rids))
    assert sizes[:3] == [2 * TILE] * 3, "a few tokens over whole tiles cost as much as a step of decodes"
    yield from t.run_until_all_finished([*streams, measured, long])


@scripted(IN_STEPS, must_reach=[BOUNDED])
def test_a_gap_of_ten_milliseconds_is_not_bounded(t):
    """On a fast machine five steps of one decode are over before anybody notices."""
    fast = PER_TOKEN_S / 30
    stream = t.start_req(prompt_len=CHUNK, max_new_tokens=200, ignore_eos=True)
    yield
    yield from _run_at(t, fast, 6)
    long = t.start_req(prompt_len=2 * CHUNK, prompt_seed=1, max_new_tokens=1)
    yield from _run_at(t, fast, 5)
    parts = _parts(t, long, 2 * CHUNK)
    t.sometimes(BOUNDED, parts[0] < CHUNK)
    assert parts[0] + 1 >= 0.75 * 0.01 / fast, "prompts get less than 10 ms beside a decode"
    yield from t.run_until_all_finished([stream, long])
