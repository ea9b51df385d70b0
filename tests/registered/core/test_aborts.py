"""Abort one, abort all.

Goal: an abort ends exactly the request that it names, in every place, and leaves the others as they were. Method:
requests in every place of the books at once: running, dispatched, partly prefilled, waiting. Origin: the core contracts
of SGLang's scripted runtime; B11. Mutants: abort-all-overlooks-the-dispatched, newest-goes-first,
continue-needs-a-pause, abort-all-of-nothing-kills.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "a request in every place"


@scripted(PP4, must_reach=[WINDOW])
def test_abort_all_reaches_every_place(t):
    requests = yield from _one_in_every_place(t)
    call = t.abort_all()
    yield
    runs, dispatched, chunked, waits = requests
    assert dispatched.finished, "a dispatched request outlived abort_all"
    assert {r.finish_reason for r in (runs, dispatched, chunked, waits)} == {"abort"}
    assert not t.list_active_reqs()
    assert call.status == 200
    yield from t.run_until_idle()
    assert t.state.kv.held == 0
    assert t.state.rows.free == t.state.rows.total


@scripted(PP4, must_reach=[WINDOW])
def test_abort_of_one_leaves_the_others(t):
    runs, dispatched, chunked, waits = yield from _one_in_every_place(t)
    t.abort(chunked)
    yield from t.run_until_finished(chunked)
    yield from t.run_until_all_finished([runs, dispatched, waits])
    assert chunked.finish_reason == "abort"
    assert {r.finish_reason for r in (runs, dispatched, waits)} == {"length"}


@scripted(PP4)
def test_abort_all_of_nothing(t):
    call = t.abort_all()
    yield
    assert call.status == 200
    assert t.is_fully_idle


def _one_in_every_place(t):
    runs = t.start_req(prompt_len=20, max_new_tokens=12)
    yield from t.advance_to_decode_step(runs, 1)
    dispatched = t.start_req(prompt_len=40, prompt_seed=1, max_new_tokens=4)
    chunked = t.start_req(prompt_len=6 * CHUNK, prompt_seed=2, max_new_tokens=4)
    waits = t.start_req(prompt_len=6 * CHUNK, prompt_seed=3, max_new_tokens=4)
    yield
    places = [r.req.place for r in (runs, dispatched, chunked, waits)]
    t.sometimes(WINDOW, places == ["running", "dispatched", "chunked", "waiting"])
    return runs, dispatched, chunked, waits
