"""The flagship race: a flush between the dispatch of a request's last chunk and its result.

Goal: ``/flush_cache`` is refused while a microbatch is in flight, although every queue is empty. Method: four stages,
depth six, a prompt of two chunks; wait for the window, flush, run to the end. Origin: G01 (SGLang pull request 27446),
B15. Mutant: flush-ignores-in-flight.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@scripted(PP4, must_reach=["the last chunk is in flight and every queue is empty"])
def test_flush_while_chunk_results_are_in_flight(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes("the last chunk is in flight and every queue is empty", r.chunks_done == 2 and not r.output_ids)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert "in_flight=" in flush.text
    assert r.finish_reason == "length"
    assert len(r.output_ids) == 2
