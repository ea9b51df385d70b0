"""G09: an abort while the final chunk is in flight.

Goal: no token of the aborted request is emitted, its slot comes back with the result, and a new life of its rid
inherits nothing. Method: four stages, wait until the last chunk is launched, abort, look at every reply of the
scheduler. Origin: SGLang issue 34112 and pull request 37295; B11, B12, B14, D04. Mutants: token-after-the-end,
dropped-result-leaks-its-slot.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from engine.core.messages import TokenOutput
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "the last chunk is in flight"


@scripted(PP4, must_reach=[WINDOW])
def test_abort_while_the_final_chunk_is_in_flight(t):
    a = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_stage(a, "last_chunk")
    t.sometimes(WINDOW, t.state.in_flight and not a.output_ids)
    t.abort(a)
    yield from t.run_until(lambda: not t.state.in_flight)
    said = [
        reply for step in t.history for reply in step.replies if isinstance(reply, TokenOutput) and reply.rid == a.rid
    ]
    assert said[-1].finish_reason == "abort", "a token was emitted after the end"
    assert not any(reply.token_ids for reply in said)
    assert a.client.token_ids == ()
    assert a.client.finish_reason == "abort"


@scripted(PP4, must_reach=[WINDOW])
def test_an_aborted_request_gives_its_slot_back(t):
    a = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_stage(a, "last_chunk")
    t.sometimes(WINDOW, t.state.in_flight and not a.output_ids)
    t.abort(a)
    for _ in range(PP4.depth + 1):
        yield
    assert t.is_fully_idle, t.scheduler.books.what_is_busy()
    assert t.state.rows.free == t.state.rows.total
    assert t.state.kv.held == 0


@scripted(PP4, must_reach=[WINDOW])
def test_a_new_life_of_the_rid_inherits_nothing(t):
    """The result of the first life comes back while the second one is alive; the token oracle compares the second."""
    first = t.start_req(rid="twice", prompt_len=2 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_stage(first, "last_chunk")
    t.abort(first)
    yield from t.run_until_finished(first)
    second = t.start_req(rid="twice", prompt_len=CHUNK - 5, prompt_seed=1, max_new_tokens=4)
    yield
    t.sometimes(WINDOW, sum("twice" in microbatch.rids for microbatch in t.state.in_flight) > 1)
    yield from t.run_until_finished(second)
    assert first.output_ids == ()
    assert first.finish_reason == "abort"
    assert second.finish_reason == "length"
    assert second.client.token_ids == second.output_ids
