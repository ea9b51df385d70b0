"""A prefill engine sends each full page that was asked for once, when it is confirmed, and to its place.

Goal: nothing is sent that no result has confirmed, the cached prefix is sent like what was computed, a retraction sends
nothing again, and every page lands where the decode engine wants it. Method: prompts from a later page on, a warm
cache, two chunks in flight, a pause between them, and a page that another request publishes first; the orders to the
stages are counted, and the simulated stages compare what they send with the KV of the prompt. Origin: SGLang pull
requests 33309, 33970 and 30545; sglang-jax pull request 1523; vLLM pull request 50297; TensorRT-LLM issue 12542.
Mutants: sent-before-its-result, cached-prefix-is-not-sent, sent-to-the-wrong-place, sent-twice,
retraction-sends-again, sent-from-a-page-that-is-given-back, prefill-engine-generates.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.plan import SendPages
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=4, suite="base-cpu")

PREFILL = EngineConfig(role="prefill", page_size=4, chunked_prefill_size=16, max_total_tokens=256)
TWO_STAGES = PREFILL.model_copy(update={"pp_size": 2})
LATER = "the decode engine has the first three pages"
WARM = "six pages are cached"
TWO_IN_FLIGHT = "the next chunk is in flight when the first one is confirmed"
BETWEEN = "it is sent back between two chunks"
PUBLISHED = "another request has published the same pages while the chunk was in flight"


def _sent(t):
    """Each order to send, as the place of its first page and how many they are."""
    return [(one.first, len(one.pages)) for record in t.history for one in record.transfers if _sends(one)]


def _sends(order):
    return isinstance(order, SendPages)


@scripted(PREFILL, must_reach=[LATER])
def test_what_is_sent_lands_at_its_place(t):
    a = t.prefill(prompt_len=40, first_page=3)
    yield from t.run_until_finished(a)
    t.sometimes(LATER, a.message.deliver.first_page == 3)
    assert _sent(t) == [(0, 1), (1, 4), (5, 2)], "pages are sent twice, or to the wrong place"


@scripted(PREFILL, must_reach=[WARM])
def test_the_cached_prefix_is_sent(t):
    yield from t.run_until_finished(t.prefill(prompt_len=24))
    before = len(_sent(t))
    a = t.prefill(prompt_len=40, first_page=2)
    yield from t.run_until_finished(a)
    t.sometimes(WARM, a.cached_tokens == 24)
    assert _sent(t)[before:] == [(0, 8)], "the cached prefix of a prompt is not sent"


@scripted(TWO_STAGES, must_reach=[TWO_IN_FLIGHT])
def test_nothing_is_sent_before_its_result(t):
    t.hold_results()
    a = t.prefill(prompt_len=40)
    yield from t.run_until(lambda: len(t.state.in_flight) == 2)
    assert not _sent(t), "a page is sent before the result that confirms it"
    t.release_results(1)
    yield from t.run_until(lambda: bool(_sent(t)))
    t.sometimes(TWO_IN_FLIGHT, a.remaining_prompt_tokens < 40 - 16)
    assert _sent(t) == [(0, 4)], "a page is sent before the result that confirms it"
    t.release_results()
    yield from t.run_until_finished(a)
    assert _sent(t) == [(0, 4), (4, 4), (8, 2)]


@scripted(PREFILL, must_reach=[BETWEEN])
def test_a_retraction_sends_nothing_again(t):
    a = t.prefill(prompt_len=56)
    yield from t.run_until(lambda: len(_sent(t)) == 2)
    t.pause_generation("retract")
    yield from t.run_until(lambda: a.status == "waiting")
    t.sometimes(BETWEEN, len(_sent(t)) == 3)
    t.evict()
    t.continue_generation()
    yield from t.run_until_finished(a)
    assert (a.retractions, a.finish_reason) == (1, "length")
    assert _sent(t) == [(0, 4), (4, 4), (8, 4), (12, 2)], "pages are sent again after a retraction"


@scripted(PREFILL, must_reach=[PUBLISHED])
def test_what_is_sent_is_not_given_back_for_the_page_of_another(t):
    t.exhaust_kv(16)
    t.hold_transfers()
    a = t.prefill(prompt_len=24)
    yield from t.run_until(lambda: t.state.transferring == [a.rid])
    t.hold_results()
    b = t.prefill(prompt_len=40)
    yield from t.run_until(lambda: b.is_chunking and bool(t.state.in_flight))
    t.release_transfers()
    yield from t.run_until_finished(a)
    t.hold_transfers()
    published = t.state.kv.cached
    t.release_results()
    yield
    t.sometimes(PUBLISHED, b.cached_tokens < 4 * published)
    sent = t.history[-1].transfers[0].pages
    tree = t.scheduler.memory.tree
    assert set(sent) <= {page for node in tree.nodes() for page in node.pages}, "a page is sent that is given back"
    t.release_transfers()
    yield from t.run_until_finished(b)


@scripted(PREFILL)
def test_a_client_is_sent_to_a_decode_engine(t):
    """In both tiers: the front end refuses it, and nothing arrives."""
    with pytest.raises(RequestRefused, match="call a decode engine") as caught:
        t.start_req(prompt_len=20)
    assert caught.value.status == 421
    yield
    assert t.state.waiting == [], "a prompt is computed for a client that asked for text"
    yield from t.run_until_finished(t.prefill(prompt_len=20))
