"""Goal: one text of a script runs on every scheduler with the verbs that it uses.

Window: a prompt in parts is in flight when a flush, an abort and held results come.
Covers: D04 one t, whatever the adapter.
Mutants: flush-answers-but-does-nothing, lock-refs-are-not-released.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted
from scripted.core.adapters import adapter_named
from scripted.script.options import ScriptOptions

register_cpu_ci(est_time=8, suite="base-cpu")

EXAMPLE = "examples/your_scheduler/fixed.py"
OUTSIDE = "examples/lockstep/outside.py"
HELD = "results are held"
OPTIONS = ScriptOptions(must_reach=(HELD,))


def one_text(t):
    r = t.start_req(prompt_len=20, max_new_tokens=3)
    assert (r.status, r.finished, t.state.arrived[0].kind) == ("waiting", False, "start")
    yield from t.run_until(lambda: t.state.in_flight)
    assert r.rid in t.state.in_flight[0].rids
    assert t.last_batch_forward_mode == "prefill"
    assert t.forward_ct == 1
    other = t.start_req(rid="other", prompt_len=9, prompt_seed=1, max_new_tokens=4)
    t.hold_results()
    yield
    yield
    t.sometimes(HELD, t.state.in_flight and not r.output_ids)
    t.abort(other)
    t.release_results()
    yield from t.run_until_finished(other)
    assert (other.status, other.finish_reason) == ("aborted", "abort")
    yield from t.advance_to_decode_step(r, 2)
    assert r.status == "running"
    yield from t.run_until_finished(r)
    assert (r.finish_reason, len(r.output_ids)) == ("length", 3)
    assert (r.client.status, r.client.token_ids, r.client.closed) == (200, r.output_ids, True)
    yield from t.run_until_idle()
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200
    assert t.state.kv.free == t.state.kv.total
    again = t.start_req(prompt_len=20, max_new_tokens=3)
    yield from t.run_until_finished(again)
    assert (again.cached_tokens, again.output_ids) == (0, r.output_ids)


@scripted(EngineConfig(chunked_prefill_size=16), must_reach=[HELD])
def test_on_the_engine(t):
    yield from one_text(t)


@scripted(EngineConfig(pp_size=2, chunked_prefill_size=16), must_reach=[HELD])
def test_on_two_stages(t):
    yield from one_text(t)


@pytest.mark.parametrize("adapter", [EXAMPLE, OUTSIDE, "vllm"])
def test_on_another_scheduler(adapter: str) -> None:
    if adapter == "vllm":
        pytest.importorskip("vllm", reason="no vLLM is installed; `make vllm` makes an environment with one")
    other = adapter_named(adapter)
    passed = other.run_script(one_text, {}, config=other.read_config({}), options=OPTIONS, mutant=None)
    assert passed.reached[HELD]
