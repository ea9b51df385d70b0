"""The flush window at every depth and number of stages.

Goal: the flagship's window opens and is closed to a flush with two, three and four stages and with zero, one and two
microbatches beyond them. Method: the flagship's script on nine configurations; two of them on real processes, the
flagship's included. Origin: the depth sweep of SGLang's scripted runtime, G01; B15. Mutant: flush-ignores-in-flight.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import ScriptedSim, ScriptError, ScriptOptions

register_cpu_ci(est_time=4, suite="base-cpu")
register_cuda_ci(est_time=90, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
SIGNATURE = "This request holds the node from another tree"


def flush_in_the_window(t):
    r = t.start_req(prompt_len=2 * CHUNK - 3, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    t.sometimes("window", r.chunks_done == 2 and not r.output_ids)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert "in_flight=" in flush.text
    after = t.flush_cache()
    yield
    assert after.status == 200


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_window_in_the_sim_tier(stages, depth):
    config = EngineConfig(pp_size=stages, pp_async_depth=depth, chunked_prefill_size=CHUNK)
    with ScriptedSim.start(config) as sim:
        assert sim.run(flush_in_the_window).reached == {"window": 1}
    mutant = "flush-ignores-in-flight"
    with ScriptedSim.start(config, mutant=mutant) as broken, pytest.raises(ScriptError, match=SIGNATURE):
        broken.run(flush_in_the_window, options=ScriptOptions(check_every_step=False))


@pytest.mark.parametrize(("stages", "depth"), [(3, 1)])
def test_window_on_processes(harness, stages, depth):
    config = EngineConfig(pp_size=stages, pp_async_depth=depth, chunked_prefill_size=CHUNK)
    with harness(config) as engine:
        assert engine.run(flush_in_the_window).reached == {"window": 1}
