"""A receiver keeps its pages until the stages have ended its transfer, even if the request ends first.

Goal: a request that is aborted, times out or is retracted while its KV arrives keeps its pages until no stage writes
them, then gives them back once, and the stages and the prefill engine are told that it has left. Method: transfers are
held, so that nothing comes; the request leaves; the pages that are held are counted in the step of its end and after
it. Origin: SGLang issue 24527 and pull requests 9817, 27372 and 35049; vLLM pull request 25067; TensorRT-LLM pull
request 12314. Mutants: receiver-freed-while-kv-comes, receiver-freed-twice, aborted-receiver-keeps-its-pages,
abort-does-not-stop-the-transfer, abort-untold-to-the-prefill-engine, retraction-does-not-stop-the-transfer,
death-keeps-what-transfers-use.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PagesReceived, PrefillDropped
from engine.core.plan import StopTransfer
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

DECODE = EngineConfig(role="decode", page_size=4, chunked_prefill_size=16, max_total_tokens=256)
TWO_STAGES = DECODE.model_copy(update={"pp_size": 2})
ON_ITS_WAY = "the KV of seven pages is on its way"


def _receives(t, **more):
    """Start a request that has its pages while no KV arrives."""
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4, **more)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.sometimes(ON_ITS_WAY, t.state.kv.held == 7 and not a.req.planned_tokens < 28)
    return a


def _told(t, kind):
    return [one for record in t.history for one in (*record.replies, *record.transfers) if isinstance(one, kind)]


def _ended(t):
    return [event for record in t.history for event in record.events if isinstance(event, PagesReceived)]


@pytest.mark.parametrize("leaves", ["abort", "disconnect", "timeout"])
@scripted(DECODE, must_reach=[ON_ITS_WAY])
def test_a_receiver_that_leaves_keeps_its_pages_until_the_stages_are_done(t, leaves):
    a = yield from _receives(t, timeout_s=5.0 if leaves == "timeout" else None)
    if leaves == "timeout":
        t.clock.advance(5.0)
    else:
        (t.abort if leaves == "abort" else t.disconnect)(a)
    yield
    assert a.finished
    assert t.state.kv.held == 7, "pages are given back while KV comes into them"
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert len(_told(t, StopTransfer)) == 1, "the stages do not hear that the request has left"
    assert len(_told(t, PrefillDropped)) == 1, "the prefill engine computes for a request that has left"
    assert len(_ended(t)) == 1
    assert t.state.kv.held == 0, "the pages of a request that has left are held forever"
    assert flush.status == 200, flush.text


@scripted(DECODE, must_reach=[ON_ITS_WAY])
def test_a_retracted_receiver_waits_when_the_stages_are_done(t):
    a = yield from _receives(t)
    t.pause_generation("retract")
    yield
    assert (a.status, t.state.kv.held) == ("running", 7), "pages are given back while KV comes into them"
    yield
    assert (a.status, t.state.kv.held) == ("waiting", 0), "the stages do not hear that the request is sent back"
    assert len(_told(t, PrefillDropped)) == 1
    t.release_transfers()
    t.continue_generation()
    yield from t.run_until_finished(a)
    assert a.retractions == 1


@scripted(TWO_STAGES, must_reach=[ON_ITS_WAY])
def test_a_death_ends_every_transfer(t):
    a = yield from _receives(t)
    t.disconnect(a)
    t.kill_stage(0)
    yield from t.run_until(lambda: a.finished)
    yield
    assert t.state.kv.held == 0, "the stages are gone, and pages are kept for what they do"
