"""Unfinished work of a script affects neither the oracle, nor the reset, nor another script.

Goal: a test is red for its own fault alone. Method: after a request has finished, a script does one thing of each kind
that can be done to an engine and ends, without a step that would see it, with nothing or with another request in
flight; its outputs are compared all the same, and the next script on the same engine finds it as good as new. Every
action has an entry. Origin: D03, D06, a pause and an unspent failure that failed innocent comparisons.
"""

from collections.abc import Generator

import pytest
from scripted_lockstep import actions
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults

register_cpu_ci(est_time=20, suite="base-cpu")

CONFIG = EngineConfig(
    pp_size=2, chunked_prefill_size=64, max_total_tokens=1024, page_size=16, lora="x=embedded-lora:1", max_loras=1
)
RECEIVES = EngineConfig(**CONFIG.model_dump(exclude_unset=True) | {"role": "decode"})
PROMPT_TOKENS = 40


def fail_a_transfer(t, r):
    del r
    t.hold_transfers()
    t.start_req(prompt_len=70, prompt_seed=5)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.fail_transfer(pages=1)


LEAVE = {
    actions.StartRequest: lambda t, r: t.start_req(prompt_len=70, prompt_seed=1),
    actions.AbortRequest: lambda t, r: t.abort("no-such-request"),
    actions.DisconnectClient: lambda t, r: t.disconnect(t.start_req(prompt_len=10, prompt_seed=2)),
    actions.AbortEverything: lambda t, r: t.abort_all(),
    actions.Flush: lambda t, r: t.flush_cache(timeout_s=9.0),
    actions.Update: lambda t, r: t.update_weights("embedded:1", timeout_s=9.0),
    actions.PauseServing: lambda t, r: t.pause_generation("in_place"),
    actions.ResumeServing: lambda t, r: t.continue_generation(),
    actions.SleepServing: lambda t, r: t.sleep(level=2),
    actions.WakeServing: lambda t, r: (t.sleep(), t.wake()),
    actions.BeginProfile: lambda t, r: t.start_profile(),
    actions.EndProfile: lambda t, r: (t.start_profile(), t.stop_profile()),
    HoldResults: lambda t, r: t.hold_results(),
    ReleaseResults: lambda t, r: (t.hold_results(), t.release_results(1)),
    actions.HoldGrammars: lambda t, r: (t.hold_grammars(), t.start_req(prompt_len=9, prompt_seed=4, regex="[a-c]{2}")),
    actions.ReleaseGrammars: lambda t, r: (t.hold_grammars(), t.release_grammars(1)),
    actions.FailGrammar: lambda t, r: t.fail_next_grammar(),
    actions.HoldLoras: lambda t, r: (t.hold_loras(), t.load_lora("left", "embedded-lora:3")),
    actions.ReleaseLoras: lambda t, r: (t.hold_loras(), t.release_loras(1)),
    actions.Press: lambda t, r: (t.exhaust_kv(0), t.exhaust_rows(0), t.exhaust_locks(0)),
    actions.Relieve: lambda t, r: t.release_exhausted(),
    actions.Evict: lambda t, r: t.evict(1),
    actions.FailStage: lambda t, r: t.fail_next_step(1),
    actions.KillStage: lambda t, r: t.kill_stage(1),
    actions.StallStage: lambda t, r: t.stall_stage(0),
    actions.ResumeStage: lambda t, r: (t.stall_stage(0), t.resume_stage(0)),
    AdvanceClock: lambda t, r: t.clock.advance(5.0),
    actions.HoldTransfers: lambda t, r: (t.hold_transfers(), t.start_req(prompt_len=70, prompt_seed=5)),
    actions.ReleaseTransfers: lambda t, r: (t.hold_transfers(), t.release_transfers()),
    actions.FailTransfer: fail_a_transfer,
    actions.LoraLoad: lambda t, r: t.load_lora("left", "embedded-lora:3"),
    actions.LoraUnload: lambda t, r: t.unload_lora("x"),
}
KINDS = {kind.__name__: leave for kind, leave in LEAVE.items()}
OF_TRANSFERS = {"HoldTransfers", "ReleaseTransfers", "FailTransfer"}


def leaves_behind(t, kind, busy):
    r = t.start_req(prompt_len=PROMPT_TOKENS, max_new_tokens=4, ignore_eos=True)
    yield from t.run_until_finished(r)
    if busy:
        t.start_req(prompt_len=90, prompt_seed=3, max_new_tokens=4)
        yield
        assert t.state.in_flight or t.state.transferring
    left = KINDS[kind](t, r)
    if isinstance(left, Generator):
        yield from left


def finds_it_as_new(t):
    assert t.clock.now() == 0
    assert not t.scheduler.pressure.is_on
    assert t.state.paused is None
    assert t.scheduler.counters.weights_version == 0
    assert not t.scheduler.memory.pages.cached
    assert [(one.name, one.version) for one in t.scheduler.features.loras.known.values()] == [("x", 0)]
    r = t.start_req(prompt_len=PROMPT_TOKENS, max_new_tokens=4, ignore_eos=True)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


def test_every_action_has_an_entry():
    assert set(LEAVE) == set(actions.all_actions())


def _check_what_is_left(engine, kind, busy):
    done = engine.run(leaves_behind, kind, busy)
    assert done.spent is (kind == "KillStage")
    if done.spent:
        return
    assert done.compared == 1
    assert engine.run(finds_it_as_new).compared == 1


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("kind", thinned(KINDS, one_in=2))
def test_what_is_left_behind_reaches_nothing(harness, kind, busy):
    with harness(RECEIVES if kind in OF_TRANSFERS else CONFIG) as engine:
        _check_what_is_left(engine, kind, busy)
