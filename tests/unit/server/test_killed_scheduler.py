"""``t.kill_scheduler()``: the script goes on with its clients alone, and what it finds reaches the test."""

# ruff: noqa: T201 - what a script prints is part of what comes back.

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from scripted_lockstep.tiers.server.forked_script import result_of_survivor
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptedSim, ScriptFailed, ServerDied

CONFIG = EngineConfig(chunked_prefill_size=64)
# Run by every process of the server: the front end is one of them.
TELLS_TOO_LITTLE = """
from engine.frontend.http import process
from engine.frontend.schema.errors import ApiError

process._Life._die = lambda life, death: life._end(ApiError.unavailable("something is wrong"))
"""


# -- scripts, which run in the scheduler process, and then in the copy of it --


def kills(t):
    r = t.start_req(prompt_len=20, max_new_tokens=30)
    yield from t.advance_to_decode_step(r, 1)
    print("before")
    t.kill_scheduler()
    print(f"after: {r.client.error}")
    assert "scheduler" in r.client.error
    t.sometimes("told", r.client.closed)


def fails_after_it(t):
    r = t.start_req(prompt_len=20, max_new_tokens=30)
    yield
    t.kill_scheduler()
    assert r.client.error == "nothing"  # the line that fails


def wants_a_step(t):
    r = t.start_req(prompt_len=20, max_new_tokens=30)
    yield
    t.kill_scheduler()
    yield from t.run_until_finished(r)


def wants_a_request(t):
    yield
    t.kill_scheduler()
    t.start_req(prompt_len=20)


def kills_twice(t):
    yield
    t.kill_scheduler()
    t.kill_scheduler()


def ends_in_the_copy(t):
    yield
    t.kill_scheduler()
    os._exit(3)


# -- tests --


def test_the_script_goes_on_with_its_clients_alone(capsys: pytest.CaptureFixture[str], parent: PreloadedParent) -> None:
    """A dead or late stage ends every stream with an error (A06).

    Operators see and do what the routes promise (C06).
    """
    with EngineServer.start(CONFIG, parent=parent) as server:
        done = server.run(kills)
        assert not server.usable
    assert (done.reached, done.spent, done.loose_ends) == ({"told": 1}, True, {"windows not in must_reach": 1})
    assert capsys.readouterr().out.startswith(
        "before\nafter: the server is going down because the scheduler process died"
    )


def test_nothing_is_left_of_the_copy(monkeypatch: pytest.MonkeyPatch, parent: PreloadedParent) -> None:
    seen: list[str] = []

    def noting(folder: Path, timeout_s: float) -> object:
        seen.append((folder / "survivor").read_text())
        return result_of_survivor(folder, timeout_s)

    monkeypatch.setattr("scripted_lockstep.tiers.server.runner.result_of_survivor", noting)
    with EngineServer.start(CONFIG, parent=parent) as server:
        server.run(kills)
    (pid,) = map(int, seen)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("script", "error"),
    thinned(
        [
            (fails_after_it, r"the line that fails"),
            (wants_a_step, r"yield from t\.run_until_finished\(r\)[^>]*the scheduler was killed, so no step can run"),
            (wants_a_request, r"t\.start_req\(prompt_len=20\)[^>]*nothing arrives at it any more"),
            (kills_twice, r"kill_scheduler\(\) was called before"),
        ],
        one_in=2,
    ),
)
def test_what_fails_after_it_is_reported_with_its_line(script, error: str, parent: PreloadedParent) -> None:
    with EngineServer.start(CONFIG, parent=parent) as server:
        with pytest.raises(ScriptFailed, match=error):
            server.run(script)
        assert not server.usable


def test_a_copy_that_leaves_no_result_has_not_passed(parent: PreloadedParent) -> None:
    with EngineServer.start(CONFIG, parent=parent) as server, pytest.raises(ServerDied):
        server.run(ends_in_the_copy)


def test_a_front_end_that_does_not_name_the_scheduler_is_found(
    parent: PreloadedParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spoil.py").write_text(TELLS_TOO_LITTLE)
    monkeypatch.chdir(tmp_path)
    with (
        EngineServer.start(CONFIG, parent=parent) as server,
        pytest.raises(ScriptFailed, match=r"these clients were not told so in time: scripted-1;.*something is wrong"),
    ):
        server.run(kills)


def test_there_is_no_such_process_in_sim() -> None:
    with pytest.raises(ScriptFailed, match=r"needs a scheduler in a process of its own.*tiers=\('server',\)"):
        ScriptedSim.start(CONFIG).run(kills)
