"""G18: a retracted request among an endless stream of others.

Goal: it keeps its place by arrival, so that later arrivals do not starve it. Method: two rows and a small pool;
the later of two requests is retracted while thirty others wait; count which ones finish before it. Origin: vLLM issue
41951; B06, B10. Mutant: retracted-request-loses-its-place.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

TWO_ROWS = EngineConfig(chunked_prefill_size=64, max_total_tokens=6 * 16, max_running_requests=2)
WINDOW = "it was retracted while others wait"


@scripted(TWO_ROWS, must_reach=[WINDOW])
def test_a_retracted_request_keeps_its_place(t):
    first = t.start_req(prompt_len=30, max_new_tokens=30)
    retracted = t.start_req(prompt_len=30, prompt_seed=1, max_new_tokens=30)
    others = [t.start_req(prompt_len=30, prompt_seed=2, max_new_tokens=2) for _ in range(30)]
    yield from t.run_until(lambda: retracted.retractions)
    t.sometimes(WINDOW, len(t.state.waiting) == 31)
    yield from t.run_until_finished(retracted)
    overtaken = sum(other.finished for other in others)
    assert overtaken <= 16, f"overtaken by {overtaken} requests that came later"
    assert first.finished
    yield from t.run_until_all_finished(others)
