"""G23: one stage dies, at every point of a request's life.

Goal: every client gets an error at once, and the error names the stage that was killed, not one that noticed. Method:
kill stage k while a request is at a point of its life and another one waits. Origin: prime-rl pull request 2843; A06.
Mutants: death-blames-another-stage; on processes, where the supervisor names the dead, death-looks-like-a-normal-end.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("point", ["first_chunk", "last_chunk", "first_decode", "mid_decode", "last_decode"])
@scripted(PP4, tiers=("sim",))
def test_every_client_is_told_which_stage_died(t, stage, point):
    yield from _kill(t, stage, point)


@scripted(PP4, tiers=("server",))
def test_every_client_is_told_which_process_died(t):
    yield from _kill(t, 2, "last_chunk")


def _kill(t, stage, point):
    a = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=6)
    yield from t.advance_to_stage(a, point)
    b = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=6)
    t.kill_stage(stage)
    yield from t.run_until_all_finished([a, b], max_steps=2)
    for r in (a, b):
        said = r.client.error or ""
        assert f"stage-{stage}" in said, f"{said!r} does not name the stage that was killed, {stage}"
        assert r.finish_reason == "error"
        assert r.client.terminal_answers == 1
    assert not t.list_active_reqs()
