"""Real servers under scripts that kill, stop and spoil them: which process is named, how soon, and nothing is left.

Two stages keep it light; all servers are forked from one preloaded parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from forked_commands import ForkedCommands
from scripted_lockstep.tiers.server.pool import EngineServers
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.core.errors import EngineError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptFailed, ScriptOptions, ScriptTimeout, ServerDied, ServerDirty

PP2 = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64)
PATIENCE_S = 30.0
# A death ends a script long before its own times would.
PATIENT = ScriptOptions(result_timeout_s=20 * PATIENCE_S, timeout_s=10 * PATIENCE_S)
HANG_OPTIONS = ScriptOptions(result_timeout_s=1.0, timeout_s=30.0)


@pytest.fixture
def server(parent: PreloadedParent) -> Iterator[EngineServer]:
    """A server, and afterwards the certainty that its processes and its folder are gone."""
    with EngineServer.start(PP2, parent=parent) as server:
        assert server.serving is not None
        pids, folder = list(server.serving.pids.values()), server._folder
        yield server
    await_true(lambda: not any(is_alive(pid) for pid in pids), f"the end of {pids}")
    assert not folder.exists()


def await_true(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s in vain for {what}"
        threading.Event().wait(0.02)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# -- scripts, which run in the scheduler process --


def says(t, tokens=3):
    r = t.start_req(prompt_len=100, max_new_tokens=tokens)
    yield from t.run_until_finished(r)
    assert len(r.client.token_ids) == tokens


def leaves_everything(t):
    t.hold_results()
    t.stall_stage(1)
    t.exhaust_kv(900)
    t.pause_generation("in_place")
    for seed in range(3):
        t.start_req(prompt_len=200, prompt_seed=seed, max_new_tokens=30, rid=f"left-{seed}")
    yield
    t.start_req(prompt_len=20, rid="never stepped")
    raise ValueError("left in the middle")


def starts_over(t):
    assert (t.state.step, t.state.kv.free, t.state.paused) == (0, t.state.kv.total, None)
    rs = [t.start_req(prompt_len=20, max_new_tokens=2, rid=rid) for rid in ("left-0", "never stepped")]
    yield from t.run_until_all_finished(rs)
    assert [r.finish_reason for r in rs] == ["length", "length"]


def pids_of(t) -> dict[str, int]:
    me = psutil.Process()
    stages = t.run.world._context.stage_pids
    others = [child.pid for child in me.parent().children() if child.pid not in (me.pid, *stages)]
    return {"scheduler": me.pid, "stage-1": stages[1], "frontend": others[-1], "supervisor": me.ppid()}


def kills_behind_the_harness(t, name):
    r = t.start_req(prompt_len=100, max_new_tokens=100)
    yield
    os.kill(pids_of(t)[name], signal.SIGKILL)
    yield from t.run_until_finished(r)


def stops_behind_the_harness(t):
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    yield
    os.kill(pids_of(t)["stage-1"], signal.SIGSTOP)
    yield from t.run_until_finished(r)


def kills_by_verb(t):
    r = t.start_req(prompt_len=100, max_new_tokens=30)
    yield
    t.kill_stage(1)
    yield from t.run_until_finished(r)
    assert (r.finish_reason, r.client.finish_reason) == ("error", "error")
    assert "stage-1" in r.client.error


def signals_a_stage_that_has_just_died(t):
    r = t.start_req(prompt_len=100, max_new_tokens=30)
    yield
    stage = pids_of(t)["stage-1"]
    os.kill(stage, signal.SIGKILL)
    while psutil.pid_exists(stage):  # Until the supervisor reaps it; the script hears of that at its next yield.
        time.sleep(0.01)
    t.stall_stage(1)
    t.resume_stage(1)
    t.kill_stage(1)
    yield from t.run_until_finished(r)
    assert "stage-1" in r.client.error


def leaks(t):
    r = t.start_req(prompt_len=20, max_new_tokens=1)
    yield from t.run_until_finished(r)
    t.scheduler.memory.rows.allocate(1)
    t.scheduler.memory.rows.free += 1
    raise ValueError("after a leak")


# -- tests --


def test_one_server_runs_what_comes_and_survives_failures(server: EngineServer, tmp_path: Path) -> None:
    """D04, D05: what a failed script left is aborted and answered, and the next one may use the same rids."""
    first = server.run(says)
    with pytest.raises(ScriptFailed, match="left in the middle"):
        server.run(leaves_everything)
    assert server.run(starts_over).steps
    assert server.run(says).digest == first.digest
    file = tmp_path / "any_file.py"
    for steps in (2, 3):
        file.write_text(f"def script(t):\n    for _ in range({steps}):\n        yield\n")
        namespace: dict[str, Callable[..., object]] = {}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        assert server.run(namespace["script"]).steps == steps  # type: ignore[arg-type]
    file.write_text("import no_such_module\n")
    with pytest.raises(ScriptFailed, match="no_such_module"):
        server.run(namespace["script"])  # type: ignore[arg-type]
    server.shutdown()
    server.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        server.run(says)


@pytest.mark.parametrize("name", thinned(["scheduler", "stage-1", "frontend", "supervisor"], one_in=2))
def test_killed_process_is_named_and_not_by_a_timeout(server: EngineServer, name: str) -> None:
    """A dead server is reported with its cause, a hang with every stack (D06)."""
    with pytest.raises(ServerDied) as caught:
        server.run(kills_behind_the_harness, name, options=PATIENT)
    assert f"The {name} process was the first to die" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert not server.usable


def test_stage_that_hangs_is_told_with_every_stack(server: EngineServer) -> None:
    """A dead server is reported with its cause, a hang with every stack (D06)."""
    with pytest.raises(ScriptTimeout) as caught:
        server.run(stops_behind_the_harness, options=HANG_OPTIONS)
    text = str(caught.value)
    assert "did not come back within 1.0 s: a stage hangs" in text
    assert "is stopped by a signal (SIGSTOP): nothing can get past it" in text
    assert "in stops_behind_the_harness" in text
    for process in ("stage-0", "scheduler", "frontend"):
        assert f"--- {process} (pid" in text


def test_script_goes_on_behind_a_stage_that_it_killed(server: EngineServer) -> None:
    """D06, D09: and the server is not used again."""
    assert server.run(kills_by_verb).spent
    assert not server.usable


def test_a_stage_may_die_before_the_script_signals_it(server: EngineServer) -> None:
    """D06, D09: the death is the engine's news, not an error of the verb."""
    assert server.run(signals_a_stage_that_has_just_died).spent
    assert not server.usable


def test_pool_replaces_what_was_spoilt_and_leaves_nothing(
    commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D05, D06: a dirty server refuses; the pool's next one is fresh."""
    monkeypatch.setattr(PreloadedParent, "start", commands.start_parent)
    me = psutil.Process()
    before = ({child.pid for child in me.children(recursive=True)}, me.num_fds(), threading.active_count())
    pool = EngineServers()
    with pool.lend(PP2) as server:
        with pytest.raises(ScriptFailed, match="after a leak"):
            server.run(leaks)
        with pytest.raises(ServerDirty, match="could not be reset"):
            server.run(says)
    with pool.lend(PP2) as fresh, EngineServer.start(PP2, parent=pool._parent) as second:
        assert fresh is not server
        assert fresh.run(says).digest == second.run(says).digest
    pool.close()
    await_true(lambda: {child.pid for child in me.children(recursive=True)} <= before[0], "the end of every process")
    assert (me.num_fds(), threading.active_count()) == before[1:]


def test_limits_are_those_of_the_sim_tier() -> None:
    """D01: a script meets the same numbers in both tiers."""
    assert Limits.of(PP2, EMBEDDED_FACTS).total_pages == 1024
