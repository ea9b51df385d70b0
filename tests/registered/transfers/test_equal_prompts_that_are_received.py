"""Equal prompts that arrive together at a decode engine: the first is received, the others wait for it and hit it.

Goal: the KV of a prompt comes once; a first one that is aborted, or whose transfer fails, leaves the others whole; and
what this engine computes itself waits for no transfer. Method: a transfer is held while an equal prompt waits; then it
ends, its client goes, or its prefill engine fails. Origin: the class of prefixes within a batch, for what is on its
way from another engine. Mutants: equal-prompts-are-received-again, waits-for-a-receiver-that-left,
what-is-computed-here-waits-for-a-transfer.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PrefillWanted
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

DECODE = EngineConfig(role="decode", max_total_tokens=8192)
WAITS = "the KV of a prompt does not come while an equal one is there"


def _start_two(t, **second):
    t.hold_transfers()
    first = t.start_req(prompt_len=1200, max_new_tokens=3)
    other = t.start_req(prompt_len=1200, max_new_tokens=3, **second)
    yield
    yield
    t.sometimes(WAITS, first.rid in t.state.transferring and not other.finished)
    return first, other


def _wanted(t):
    return [one.rid for record in t.history for one in record.replies if isinstance(one, PrefillWanted)]


@scripted(DECODE, must_reach=[WAITS])
def test_the_kv_of_equal_prompts_comes_once(t):
    first, other = yield from _start_two(t)
    t.release_transfers()
    yield from t.run_until_all_finished([first, other])
    assert _wanted(t) == [first.rid], "the KV of equal prompts is asked for twice"
    assert other.cached_tokens == 1184


@scripted(DECODE, must_reach=[WAITS])
def test_an_aborted_receiver_leaves_the_other_whole(t):
    first, other = yield from _start_two(t)
    t.abort(first)
    yield
    assert t.state.transferring == [other.rid], "a request waits for a prompt whose request has left"
    t.release_transfers()
    yield from t.run_until_finished(other)
    assert (first.finish_reason, other.cached_tokens) == ("abort", 0)


@scripted(DECODE, must_reach=[WAITS])
def test_a_transfer_that_fails_leaves_the_other_whole(t):
    first, other = yield from _start_two(t)
    assert _wanted(t) == [first.rid], "the KV of equal prompts is asked for twice"
    t.fail_transfer(pages=3)
    t.release_transfers()
    yield from t.run_until_all_finished([first, other])
    assert first.finish_reason == other.finish_reason == "length"


@scripted(DECODE, must_reach=[WAITS])
def test_what_is_computed_here_waits_for_no_transfer(t):
    first, other = yield from _start_two(t, return_logprob=True, logprob_start_len=1100)
    for _ in range(20):
        yield
    assert other.finished, "a prompt that is computed here waits for another engine"
    t.release_transfers()
    yield from t.run_until_finished(first)
