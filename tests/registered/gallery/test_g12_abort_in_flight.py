"""G12: an abort of one of two requests that are in different microbatches in flight.

Goal: the result of the aborted request is dropped, and the other request continues. Method: two stages; a decode of b
and a chunk of a in flight; abort a; run steps until everything is back. Origin: vLLM issue 6586; B12. Mutant:
abort-ignores-in-flight.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
PP2 = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=CHUNK)
WINDOW = "both are in flight, in different microbatches"


@scripted(PP2, must_reach=[WINDOW])
def test_abort_of_one_of_two_requests_in_flight(t):
    b = t.start_req(prompt_len=20, max_new_tokens=8)
    yield from t.advance_to_decode_step(b, 1)
    a = t.start_req(prompt_len=4 * CHUNK - 3, prompt_seed=1, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(a, 1)
    flying = [microbatch.rids for microbatch in t.state.in_flight]
    t.sometimes(WINDOW, (a.rid,) in flying and (b.rid,) in flying)
    t.abort(a)
    for _ in range(PP2.depth + 1):
        yield
    assert a.finish_reason == "abort"
    assert a.output_ids == ()
    assert not any(a.rid in microbatch.rids for microbatch in t.state.in_flight)
    yield from t.run_until_finished(b)
    assert b.finish_reason == "length"
