"""A prompt that is sent ends when all of it is sent, with an error when a part of it is not, and once.

Goal: the prefill engine says that a prompt is delivered when its last page is, also when it has nothing else to do; a
send that fails ends the request at once and stops its other sends; a request that leaves keeps its pages until no stage
reads them. Method: transfers are held, so that three of them are open; one fails, or the request is aborted, beside a
chunk in flight too. Origin: SGLang issue 33507, pull requests 31075 and 38961; TensorRT-LLM issue 12540 and pull
request 13713. Mutants: delivered-before-it-is-sent, delivered-and-never-told, failed-send-counts-as-sent,
two-failed-sends-end-twice, sender-freed-while-it-sends, aborted-sender-keeps-its-pages,
the-end-of-a-transfer-counts-for-all.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PagesSent
from engine.core.plan import StopTransfer
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

PREFILL = EngineConfig(role="prefill", page_size=4, chunked_prefill_size=16, max_total_tokens=256)
THREE = "three transfers of the prompt are open"
AND_A_CHUNK = "a transfer is open and the next chunk is in flight"


def _delivers(t):
    """Start a prompt that is computed while none of its pages is sent."""
    t.hold_transfers()
    a = t.prefill(prompt_len=40)
    # The first four of its pages are the cache's.
    for _ in range(4):
        yield
    t.sometimes(THREE, t.scheduler.books.open_transfers == 3 and not t.state.in_flight)
    return a


def _ends(t):
    return [event for record in t.history for event in record.events if isinstance(event, PagesSent)]


@scripted(PREFILL, must_reach=[THREE])
def test_a_delivery_ends_when_all_is_sent(t):
    a = yield from _delivers(t)
    assert not a.finished, "a prompt is delivered before it is sent"
    t.release_transfers()
    for _ in range(3):
        yield
    assert a.finish_reason == "length", "all is sent, and nobody is told"
    assert [end.error for end in _ends(t)] == [None] * 3
    assert t.state.kv.held == 0


@scripted(PREFILL, must_reach=[THREE])
def test_a_send_that_fails_ends_the_delivery(t):
    a = yield from _delivers(t)
    t.fail_transfer()
    yield
    assert a.finish_reason == "error", "a prompt of which a part was not sent goes on"
    assert "gone" in a.error
    assert sum(isinstance(one, StopTransfer) for one in t.history[-1].transfers) == 2
    assert t.state.kv.held == 6, "pages are given back while stages read them"
    yield from t.run_until_idle()
    assert len(_ends(t)) == 3
    assert a.client.terminal_answers == 1
    assert t.state.kv.held == 0


@scripted(PREFILL, must_reach=[THREE])
def test_an_aborted_delivery_keeps_its_pages_until_no_stage_reads_them(t):
    a = yield from _delivers(t)
    t.abort(a)
    yield
    assert (a.finish_reason, t.state.kv.held) == ("abort", 6), "pages are given back while stages read them"
    yield
    assert len(_ends(t)) == 3
    assert t.state.kv.held == 0, "the pages of a delivery that was aborted are held forever"


@scripted(PREFILL, must_reach=[AND_A_CHUNK])
def test_a_transfer_and_a_chunk_are_both_waited_for(t):
    t.hold_transfers()
    a = t.prefill(prompt_len=40)
    yield from t.run_until(lambda: t.scheduler.books.open_transfers == 1)
    t.hold_results()
    t.abort(a)
    yield
    t.sometimes(AND_A_CHUNK, bool(t.state.in_flight) and not _ends(t))
    yield
    assert len(_ends(t)) == 1
    assert t.state.kv.held == 4, "pages are given back while a stage computes in them"
    t.release_results()
    yield from t.run_until_idle()
    assert t.state.kv.held == 0
