"""G15: a request is retracted while one, two, ... depth of its results are in flight.

Goal: the retraction waits for all of them, counts none twice, and the tokens equal the undisturbed run. Method: four
stages, depth six; a prompt of eight chunks; pause (retract) when k of them are in flight. Origin: vLLM pull requests
48245 and 47900; B06, B12. Mutants: retraction-ignores-in-flight, retraction-waits-for-one-result.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "the wanted number of results is in flight"


@pytest.mark.parametrize("results", [2, 1, 3, 4, 5, 6])
@scripted(PP4, must_reach=[WINDOW])
def test_retract_with_results_in_flight(t, results):
    a = t.start_req(prompt_len=8 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(a, results)
    t.sometimes(WINDOW, len(t.state.in_flight) == results and a.req.in_flight == results)
    t.pause_generation("retract")
    for left in reversed(range(results)):
        yield from t.run_until(lambda left=left: len(t.state.in_flight) == left)
        assert (a.status == "waiting") == (left == 0), f"it is {a.status} with {left} results in flight"
    assert a.req.in_flight == 0
    assert t.state.rows.free == t.state.rows.total
    t.continue_generation()
    yield from t.run_until_finished(a)
    assert a.retractions == 1
    assert len(a.output_ids) == 4
