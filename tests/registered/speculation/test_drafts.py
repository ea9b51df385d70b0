"""Speculation: guesses that one forward verifies change when tokens come, never which.

Goal: the output equals a run alone, with any guesses; the pages of wrong guesses are given back, no request is
retracted for a guess, and only verified tokens become a prefix. Method: three tokens share nearly all of the
probability, so that some guesses hold and some do not; stops, aborts, pauses and retractions while they are verified.
Origin: vLLM pull requests 12193 and 42722, SGLang issues 13741 and 31599, transformers issue 47912. Mutants:
wrong-guesses-count-as-computed, wrong-guesses-keep-their-pages, tokens-after-a-stop, guesses-are-published,
window-slides-past-guesses, guesses-take-the-last-pages, failed-guesses-go-on, guesses-of-the-ended-are-not-counted.
"""

import itertools
import string

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=12, suite="base-cpu")

GUESS = {"speculative_algorithm": "ngram", "speculative_ngram_min": 1, "speculative_ngram_max": 1}
# Without the sanitizer, so that the outputs show the fault.
ONE_STAGE = EngineConfig(**GUESS, page_size=4)
PP4 = EngineConfig(**GUESS, page_size=4, pp_size=4, pp_async_depth=1, chunked_prefill_size=32, kv_sanitizer=True)
SMALL = EngineConfig(**GUESS, page_size=4, max_total_tokens=64, chunked_prefill_size=16, pp_size=2)
SINGLE = EngineConfig(**GUESS, speculative_num_draft_tokens=2)
WINDOW = EngineConfig(**GUESS, model="embedded-window", page_size=4, chunked_prefill_size=64, max_window_tokens=320)
# Only these three tokens are probable.
FEW = {33: 60.0, 34: 60.0, 35: 60.0}
# As many as a prime, so that every step goes through all of them.
LETTERS = string.ascii_letters[:47]
# A real model samples them about equally often.
EVEN = 5.0

HELD = "a guess held"
WRONG = "a guess was wrong"
VERIFYING = "guesses are in flight"
TIGHT = "no more pages are free than requests run"
RESTED = "guesses have rested"
KEPT_NO_GUESS = "the last guesses are verified"
HELD_AFTER_AN_ABORT = "a guess of an aborted request held"
BOTH = [HELD, WRONG, VERIFYING]


def _note(t):
    """Note the guesses' results so far."""
    stats = t.scheduler.stats()
    t.sometimes(HELD, stats.accepted_tokens > 0)
    t.sometimes(WRONG, stats.drafted_tokens > stats.accepted_tokens)


def _pages(tokens):
    return -(-tokens // 4)


def _run_until_verifying(t):
    yield from t.run_until(lambda: any(batch.drafts for batch in t.state.in_flight))
    t.sometimes(VERIFYING, any(batch.drafts for batch in t.state.in_flight))


def _run_guessing(t, *, temperature=0.0):
    """Run three guessing requests together. The oracle compares each with a run alone."""
    few = [
        t.start_req(
            prompt_len=20 + i, prompt_seed=i, max_new_tokens=20, logit_bias=FEW, temperature=temperature, seed=i
        )
        for i in range(3)
    ]
    yield from _run_until_verifying(t)
    yield from t.run_until_all_finished(few)
    _note(t)
    for r in few:
        assert r.finish_reason == "length", f"{r.rid}: {r.error}, but the same request run alone says 20 tokens"
        assert len(r.output_ids) == 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@scripted(ONE_STAGE, must_reach=BOTH)
def test_the_output_is_that_of_a_request_alone(t, temperature):
    yield from _run_guessing(t, temperature=temperature)


@pytest.mark.parametrize("temperature", thinned([0.0, 1.0], one_in=2))
@scripted(PP4, must_reach=BOTH)
def test_the_output_is_that_of_a_request_alone_on_four_stages(t, temperature):
    yield from _run_guessing(t, temperature=temperature)


@scripted(ONE_STAGE, must_reach=BOTH)
def test_penalties_count_only_what_was_said(t):
    r = t.start_req(
        prompt_len=12, max_new_tokens=24, logit_bias=FEW, temperature=1.0, seed=5, frequency_penalty=0.5,
        presence_penalty=0.3, repetition_penalty=1.2,
    )  # fmt: skip
    yield from _run_until_verifying(t)
    yield from t.run_until_finished(r)
    _note(t)


@pytest.mark.parametrize("seed", thinned(range(6), one_in=3))
@scripted(ONE_STAGE, must_reach=[VERIFYING, KEPT_NO_GUESS])
def test_the_pages_of_wrong_guesses_are_given_back(t, seed):
    """A request that is parked after its guesses were verified has the pages of its tokens and no more."""
    r = t.start_req(prompt_len=10, prompt_seed=seed, max_new_tokens=40, logit_bias=FEW, temperature=1.0, seed=seed)
    yield from _run_until_verifying(t)
    (batch,) = t.state.in_flight
    t.pause_generation("in_place")
    yield from t.run_until(lambda: not t.state.in_flight)
    confirmed = len(r.prompt_ids) + len(r.output_ids) - 1
    assert len(r.req.lease.pages) == _pages(confirmed), f"{r.req} has pages for more than its {confirmed} tokens"
    t.sometimes(KEPT_NO_GUESS, batch.drafts > 0)
    t.continue_generation()
    yield from t.run_until_finished(r)


@scripted(ONE_STAGE, must_reach=[VERIFYING])
def test_a_stop_among_the_guesses_ends_the_request(t):
    """The token that stops a request is its last one, whether guesses after it held or not."""
    several = []
    for seed in range(8):
        text = [33 + (7 * seed + place * place + place // 3) % 3 for place in range(48)]
        several.append(
            t.start_req(
                prompt_ids=text, max_new_tokens=60, logit_bias=FEW, temperature=EVEN, seed=seed, stop_token_ids=[34],
                min_new_tokens=3,
            )
        )  # fmt: skip
    yield from _run_until_verifying(t)
    yield from t.run_until_all_finished(several)
    for r in several:
        assert r.finish_reason == "stop"
        assert 34 not in r.output_ids[3:-1], f"{r.rid} goes on after its stop token: {r.output_ids}"


@scripted(ONE_STAGE, must_reach=[HELD, WRONG])
def test_only_verified_tokens_become_a_prefix(t):
    """An output comes back as a prompt: the prefix that it hits was computed for exactly these tokens."""
    r = t.start_req(prompt_len=16, max_new_tokens=24, logit_bias=FEW, temperature=1.0, seed=2)
    yield from t.run_until_finished(r)
    _note(t)
    again = t.start_req(prompt_ids=[*r.prompt_ids, *r.output_ids], max_new_tokens=6, logit_bias=FEW)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == (16 + 24 - 1) // 4 * 4


@scripted(SMALL, must_reach=[VERIFYING, TIGHT])
def test_no_request_gives_way_to_a_guess(t):
    """Guesses take free pages only, and leave one to each running request for the token that is certain."""
    both = [
        t.start_req(prompt_len=14, prompt_seed=i, max_new_tokens=19, logit_bias=FEW, temperature=1.0, seed=i)
        for i in range(2)
    ]
    yield from _run_until_verifying(t)
    while not all(r.finished for r in both):
        running, batch = len(t.state.running), t.history[-1].microbatch
        t.sometimes(TIGHT, t.state.kv.free <= running)
        for segment in () if batch is None else batch.segments:
            certain = segment.start + len(segment.token_ids) - segment.drafts
            if _pages(certain + segment.drafts) > _pages(certain):
                assert t.state.kv.free >= running, f"{segment.rid} has guesses that leave {t.state.kv.free} pages free"
        yield
    assert t.scheduler.stats().retractions == 0


@scripted(SINGLE, must_reach=[RESTED])
def test_guesses_that_fail_rest_longer_each_time(t):
    """Each letter occurs once a round, and each round has another one after it."""
    prompt, *answer = ["".join(LETTERS[place * step % 47] for place in range(47)) for step in (-1, 1, 2, 3, 4, 5)]
    r = t.start_req(prompt_ids=prompt.encode(), regex="".join(answer), max_new_tokens=5 * 47)
    yield from t.run_until_finished(r)
    launched = [record.microbatch for record in t.history if record.microbatch is not None]
    places = [segment.start for batch in launched for segment in batch.segments if segment.drafts]
    t.sometimes(RESTED, len(places) > 6)
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert gaps == [1, 1, 1, 1, 1, 64, 128], f"guesses that fail are made again {gaps} tokens later"


@pytest.mark.parametrize("steps", thinned(range(4), one_in=2))
@scripted(PP4, must_reach=[VERIFYING])
def test_an_abort_while_guesses_are_verified(t, steps):
    """The pages stay until the forward is back, and are given back once."""
    r = t.start_req(prompt_len=20, max_new_tokens=40, logit_bias=FEW)
    other = t.start_req(prompt_len=24, prompt_seed=1, max_new_tokens=12, logit_bias=FEW)
    yield from _run_until_verifying(t)
    for _ in range(steps):
        yield
    t.abort(r.rid)
    yield from t.run_until_all_finished([r, other])
    yield from t.run_until_idle()
    assert r.finish_reason == "abort"


@scripted(ONE_STAGE, must_reach=[VERIFYING, HELD_AFTER_AN_ABORT])
def test_guesses_of_a_request_that_was_aborted_are_counted(t):
    """The forward pass has verified them, even for an aborted request (vLLM pull request 28473)."""
    for seed in range(8):
        r = t.start_req(prompt_len=12, prompt_seed=seed, max_new_tokens=40, logit_bias=FEW, temperature=1.0, seed=seed)
        yield from _run_until_verifying(t)
        before = t.scheduler.stats().accepted_tokens
        t.hold_results()
        t.abort(r)
        yield
        t.release_results()
        yield from t.run_until_idle()
        counted = t.scheduler.stats().accepted_tokens
        t.sometimes(HELD_AFTER_AN_ABORT, counted > before)
        held = sum(sum(getattr(event, "accepted", ())) for record in t.history for event in record.events)
        assert counted == held, f"{held} guesses held, but {counted} are counted"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@scripted(PP4, must_reach=BOTH)
def test_a_pause_while_guesses_are_verified(t, mode):
    r = t.start_req(prompt_len=20, max_new_tokens=30, logit_bias=FEW)
    yield from _run_until_verifying(t)
    t.pause_generation(mode)
    for _ in range(8):
        yield
    t.continue_generation()
    yield from t.run_until_finished(r)
    _note(t)
    assert len(r.output_ids) == 30


@scripted(PP4, must_reach=[VERIFYING])
def test_a_flush_while_guesses_are_verified_is_refused(t):
    r = t.start_req(prompt_len=20, max_new_tokens=12, logit_bias=FEW)
    yield from _run_until_verifying(t)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400


@scripted(WINDOW, must_reach=BOTH)
def test_a_window_slides_with_what_is_verified(t):
    """A forward pass in flight still finds the last 64 tokens before each of its own."""
    several = [
        t.start_req(prompt_len=90 + i, prompt_seed=i, max_new_tokens=50, logit_bias=FEW, temperature=1.0, seed=i)
        for i in range(3)
    ]
    yield from _run_until_verifying(t)
    while not all(r.finished for r in several):
        for segment in t.history[-1].microbatch.segments:
            lease = next(r for r in several if r.rid == segment.rid).req.lease
            first = max(0, segment.start - 63) // 4
            assert lease.window_start <= first, f"the window pages of {segment.rid} are gone before {first}"
        yield
    _note(t)
    assert [len(r.output_ids) for r in several] == [50, 50, 50]
