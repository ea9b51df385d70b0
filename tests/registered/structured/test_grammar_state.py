"""The state of a grammar is a function of the output: it is right after chunks, a retraction, a prefix hit, in a batch.

Goal: every output follows its grammar to the end after any event of its request. Method: outputs are matched against
the grammar and compared with a run alone. Origin: vLLM pull requests 30916 and 22896, vLLM issues 45014 and 29379; B06.
Mutants: grammar-begins-anew, grammar-follows-the-prompt, grammar-goes-on-after-its-end, dead-end-is-overlooked.
"""

import re

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=10, suite="base-cpu")

CHUNK = 16
CONFIG = EngineConfig(chunked_prefill_size=CHUNK)
DEEP = EngineConfig(pp_size=2, pp_async_depth=2, chunked_prefill_size=CHUNK)
MIXED = EngineConfig(pp_size=2, mixed_chunk=True, chunked_prefill_size=CHUNK)
GUESSING = EngineConfig(
    pp_size=2, chunked_prefill_size=CHUNK, speculative_algorithm="draft_model", speculative_draft_model="embedded"
)
LOOKING_UP = EngineConfig(chunked_prefill_size=CHUNK, speculative_algorithm="ngram", speculative_ngram_min=1)
SMALL = EngineConfig(page_size=4, chunked_prefill_size=CHUNK, max_total_tokens=44)
REGEX = "[a-c]{3}x[0-9]{6}"


@pytest.mark.parametrize("stage", thinned(["mid_decode", "first_decode", "last_chunk", "first_chunk"], one_in=2))
@scripted(CONFIG)
def test_a_retraction_keeps_the_place(t, stage):
    a = t.start_req(prompt_len=3 * CHUNK - 3, regex=REGEX, max_new_tokens=12)
    yield from t.advance_to_stage(a, stage)
    t.pause_generation("retract")
    yield
    yield from t.run_until(lambda: not t.state.in_flight)
    assert a.retractions == 1
    t.continue_generation()
    yield from t.run_until_finished(a)
    assert re.fullmatch(REGEX, a.client.text), f"{a.client} does not follow its grammar"
    assert a.finish_reason == "stop"


@scripted(SMALL, must_reach=["sent back"])
def test_a_pool_that_is_too_small(t):
    requests = [t.start_req(prompt_len=9, prompt_seed=seed, regex=REGEX, max_new_tokens=11) for seed in range(4)]
    yield from t.run_until_all_finished(requests)
    t.sometimes("sent back", any(one.retractions for one in requests))
    assert all(re.fullmatch(REGEX, one.client.text) for one in requests)


@pytest.mark.parametrize("config", [DEEP, MIXED, GUESSING, LOOKING_UP], ids=["deep", "mixed", "guessing", "looking-up"])
def test_in_a_batch_with_others(harness, config):
    """Requests with and without a grammar, greedy and not, whose prompts are split, in one batch."""
    with harness(config) as engine:
        engine.run(_a_batch)


def _a_batch(t):
    grammars = [REGEX, None, "[p-z]{4}", None, REGEX]
    requests = [
        t.start_req(
            prompt_len=10 + 9 * index,
            prompt_seed=index,
            regex=regex,
            max_new_tokens=14,
            temperature=float(index % 2),
            seed=index,
            frequency_penalty=0.5 * (index % 3),
            return_logprob=True,
            top_logprobs_num=5,
        )
        for index, regex in enumerate(grammars)
    ]
    yield from t.run_until_all_finished(requests)
    for regex, one in zip(grammars, requests, strict=True):
        assert regex is None or re.fullmatch(regex, one.client.text)
        assert one.finish_reason == ("length" if regex is None else "stop")


@scripted(CONFIG, must_reach=["a prefix is hit"])
def test_after_a_prefix_hit(t):
    """Tokens of a prefix that others computed are no output."""
    first = t.start_req(prompt_len=40, regex=REGEX, max_new_tokens=20)
    yield from t.run_until_finished(first)
    second = t.start_req(prompt_len=40, regex=REGEX, max_new_tokens=20)
    yield from t.run_until_finished(second)
    t.sometimes("a prefix is hit", second.cached_tokens > 0)
    assert second.output_ids == first.output_ids, f"{second.client} does not follow its grammar"
    # The prompt continues like another's output, but the grammar begins with the request's own output.
    third = t.start_req(prompt_ids=[*first.prompt_ids, *first.output_ids[:5]], regex=REGEX, max_new_tokens=20)
    yield from t.run_until_finished(third)
    assert re.fullmatch(REGEX, third.client.text), f"{third.client} does not follow its grammar"


@scripted(CONFIG)
def test_what_else_ends_an_output(t):
    """The length cuts it. Its end comes with ignore_eos too, and min_new_tokens cannot keep it away."""
    cut = t.start_req(prompt_len=10, regex=REGEX, max_new_tokens=4)
    ignoring = t.start_req(prompt_len=10, prompt_seed=1, regex="[a-c]{2}", ignore_eos=True, max_new_tokens=9)
    short = t.start_req(prompt_len=10, prompt_seed=2, regex="[a-c]{2}", min_new_tokens=6, max_new_tokens=9)
    biased = t.start_req(prompt_len=10, prompt_seed=3, regex="[a-c]{2}", logit_bias={120: 100}, max_new_tokens=9)
    yield from t.run_until_all_finished([cut, ignoring, short, biased])
    assert cut.finish_reason == "length"
    assert re.fullmatch("[a-c]{3}x", cut.client.text)
    for one in (ignoring, short, biased):
        assert one.finish_reason == "stop", f"{one.client} does not follow its grammar"
        assert re.fullmatch("[a-c]{2}", one.client.text)


@scripted(MIXED, must_reach=["in a batch with others"])
def test_a_dead_end_ends_its_request_alone(t):
    """B11: after what it has said, wherever it is in its batch; one that ends before that is none of it."""
    dead = "start: /[a-c]{4}/ MORE\nMORE: /x/ & /y/"
    lost = [t.start_req(prompt_len=20, prompt_seed=seed, ebnf=dead, max_new_tokens=9) for seed in range(2)]
    short = t.start_req(prompt_len=20, prompt_seed=2, ebnf=dead, max_new_tokens=4)
    other = t.start_req(prompt_len=20, prompt_seed=3, max_new_tokens=16)
    yield from t.advance_to_decode_step(lost[0], 3)
    t.sometimes("in a batch with others", {lost[0].rid, other.rid} <= set(t.batch_composition()["running"]))
    yield from t.run_until_all_finished([*lost, short, other])
    for one in lost:
        assert one.finish_reason == "invalid", f"{one} does not follow its grammar"
        assert re.fullmatch("[a-c]{4}", "".join(map(chr, one.output_ids))), f"{one} does not follow its grammar"
    assert (short.finish_reason, other.finish_reason) == ("length", "length")
