"""Compiled grammars are kept while a request needs them, and a bounded number of them after that.

Goal: equal grammars are compiled once, none is forgotten that is still needed, a flush forgets the rest. Method:
counters and outputs of requests that share grammars, with bounds of 64, 1 and 0. Origin: SGLang pull requests 22054 and
13947; B10. Mutants: flush-keeps-grammars, grammar-forgotten-in-use.
"""

import re

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=5, suite="base-cpu")

CONFIG = EngineConfig(chunked_prefill_size=32, max_total_tokens=512)
ONE_ROW = EngineConfig(chunked_prefill_size=32, max_running_requests=1, max_cached_grammars=0)
KEEPS_ONE = EngineConfig(chunked_prefill_size=32, max_cached_grammars=1)
REGEX = "[a-c]{5}"


@scripted(CONFIG)
def test_a_flush_forgets_what_is_not_used(t):
    for seed in range(2):
        one = t.start_req(prompt_len=20, prompt_seed=seed, regex=REGEX)
        yield from t.run_until_finished(one)
    stats = t.engine_stats()
    assert (stats.grammars_compiled, stats.grammar_hits) == (1, 1)
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200
    again = t.start_req(prompt_len=20, regex=REGEX)
    yield from t.run_until_finished(again)
    assert re.fullmatch(REGEX, again.client.text)
    assert t.engine_stats().grammars_compiled == 2, "the engine has grown: a flush has kept a grammar"


@scripted(ONE_ROW, must_reach=["the second waits for the row"])
def test_a_grammar_is_kept_for_the_next_user(t):
    first = t.start_req(prompt_len=20, regex=REGEX)
    second = t.start_req(prompt_len=20, prompt_seed=1, regex=REGEX)
    yield from t.advance_to_decode_step(first, 1)
    t.sometimes("the second waits for the row", second.status == "waiting" and not t.state.waiting_for_grammar)
    yield from t.run_until_all_finished([first, second])
    why = "a grammar must be compiled before it is used"
    assert re.fullmatch(REGEX, second.client.text), f"{why}: {second.client}"
    assert t.engine_stats().grammars_compiled == 1


@scripted(KEEPS_ONE)
def test_the_one_that_is_unused_for_longest_is_forgotten(t):
    for regex in ("[a-c]{2}", "[d-f]{2}", "[d-f]{2}", "[a-c]{2}"):
        one = t.start_req(prompt_len=20, regex=regex)
        yield from t.run_until_finished(one)
        assert re.fullmatch(regex, one.client.text)
    stats = t.engine_stats()
    assert (stats.grammars_compiled, stats.grammar_hits) == (3, 1)
