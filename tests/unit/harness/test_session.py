"""The session of one pytest process: what it hands to engines, and whose fault a dirty engine is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.tiers.server import pool

from engine import EngineConfig
from scripted import BadCall, ScriptedServer, ScriptOptions, ServerDirty, pytest_plugin, pytest_session, scripted
from scripted.pytest_session import ScriptedSession, current_session
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.tally import NOT_VETTED, NOTICES_NOTHING
from scripted.script import vetting
from scripted.script.decorator import spec_of


def only_looked_at(t):
    yield


def one_request(t):
    r = t.start_req(prompt_len=3, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == 2


SPEC = spec_of(scripted(EngineConfig())(only_looked_at))


class Engine(ScriptedServer):
    """Stands for a server: refuses as dirty if it is, and notes what it was asked to run."""

    is_alive = True

    def __init__(self, *, dirty: bool = False, has_failed: bool = False, begun: bool = True) -> None:
        super().__init__(SPEC.config)
        self.dirty = dirty
        self.begun = begun
        self.has_failed = has_failed
        self.options: list[ScriptOptions] = []

    def shutdown(self) -> None:
        self.usable = False

    def _run(self, script: Any, args: Any, kwargs: Any, options: ScriptOptions) -> ScriptSucceeded:
        del script, args, kwargs
        self.options.append(options)
        if self.dirty:
            raise ServerDirty(FailureReport(kind=FailureKind.DIRTY, error="running=1", begun=self.begun))
        return ScriptSucceeded(steps=1, digest="", plan_digest="", reached={})


@pytest.fixture
def session_on(monkeypatch: pytest.MonkeyPatch):
    """A session that lends these engines, one after the other."""

    def make(*engines: Engine, **options: Any) -> ScriptedSession:
        session, left = ScriptedSession(**options), list(engines)

        @contextlib.contextmanager
        def lend(*_: object, **__: object) -> Iterator[Engine]:
            yield left.pop(0)

        monkeypatch.setattr(session, "harness", lend)
        return session

    return make


def test_what_a_failed_script_left_is_not_the_next_ones_fault(session_on) -> None:
    """D05: it runs on a fresh server instead."""
    dirty, fresh = Engine(dirty=True, has_failed=True), Engine()
    session_on(dirty, fresh).run(SPEC, "server", {})
    assert (len(dirty.options), len(fresh.options)) == (1, 1)


def test_who_left_a_server_broken_is_named(session_on) -> None:
    """D05, 46.16: not the script that finds it so, which runs on a fresh one."""
    broken = Engine(dirty=True, begun=False)
    broken.used_by = "test_a.py::test_that_leaks"
    session = session_on(broken, Engine())
    session.run(SPEC, "server", {})
    blame = "servers that test_a.py::test_that_leaks left broken, found before other scripts"
    assert (session.take_counts() or {})[blame] == 1


@pytest.mark.parametrize("every_step", [True, False])
def test_the_books_are_audited_as_often_as_the_session_says(session_on, every_step: bool) -> None:
    engine = Engine()
    session_on(engine, every_step=every_step).run(SPEC, "server", {})
    assert [options.check_every_step for options in engine.options] == [every_step]


@pytest.mark.parametrize(("device", "tier", "expected"), [("cuda", "server", "cuda"), (None, "server", "auto")])
def test_servers_compute_where_the_session_says(
    monkeypatch: pytest.MonkeyPatch, device: str | None, tier: str, expected: str
) -> None:
    started: list[EngineConfig] = []

    def start(config: EngineConfig, **_: object) -> Engine:
        started.append(config)
        return Engine()

    monkeypatch.setattr(pool, "start_server", start)
    monkeypatch.setattr(pool, "start_parent", lambda: contextlib.nullcontext())
    session = ScriptedSession(device=device)
    with session.harness(EngineConfig(seed=3), tier) as engine:
        assert engine.tier == tier
    assert started == [EngineConfig(seed=3, device=expected)]


def test_a_device_that_is_none_is_refused() -> None:
    config = SimpleNamespace(getoption=lambda name: "gpu" if name == "scripted_device" else None)
    with pytest.raises(pytest.UsageError, match="--device must be cpu, cuda or cuda:N, got 'gpu'"):
        pytest_plugin.pytest_configure(config)  # type: ignore[arg-type]


def test_server_that_is_dirty_of_itself_fails_the_script(session_on) -> None:
    """A reset that does not become quiet names what is in flight (D05)."""
    with pytest.raises(ServerDirty, match="running=1"):
        session_on(Engine(dirty=True)).run(SPEC, "server", {})


def test_engine_is_told_how_to_replay_and_how_often_to_audit(session_on) -> None:
    """A refused call raises with status and body (D02)."""
    engine = Engine()
    session = session_on(engine, mutant="flush-ignores-in-flight", every_step=False)
    session.node_id = "tests/test_a.py::test_b[server]"
    session.run(SPEC, "server", {})
    (options,) = engine.options
    assert options.replay == "pytest 'tests/test_a.py::test_b[server]' --tier server --mutant flush-ignores-in-flight"
    assert not options.check_every_step
    session = ScriptedSession(mutant="flush-ignores-in-flight", device="cuda:1", long_options={"--mutant"})
    session.node_id = "test_a.py::test_b"
    command = "pytest test_a.py::test_b --tier server --scripted-mutant flush-ignores-in-flight --invariants step"
    assert session._replay_command(SPEC, "server") == f"{command} --device cuda:1"


def test_argument_that_cannot_travel_is_refused_in_both_tiers(session_on) -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""
    engine = Engine()
    with pytest.raises(BadCall, match="fixture is a object, which cannot travel to the scheduler process"):
        session_on(engine).run(SPEC, "sim", {"fixture": object()})
    assert engine.options == []


def test_session_without_a_server_tier_starts_no_server() -> None:
    session = ScriptedSession()
    with session.harness(EngineConfig(), "sim") as sim:
        assert sim.run(SPEC.script).steps == 1
    session.close()
    assert not session._servers
    assert current_session() is not session


def test_vetting_runs_no_script_after_its_time(monkeypatch) -> None:
    """Each would cost a process, and there may be a thousand."""
    session = ScriptedSession()
    session.run(spec_of(scripted(EngineConfig())(one_request)), "sim", {})
    monkeypatch.setattr(pytest_session, "_VETTING_S", 0.0)
    monkeypatch.setattr(vetting, "run_in_child", lambda *_: pytest.fail("a script is vetted, and there is no time"))
    assert [counts for _, counts in session.vet({}).values()] == [{NOT_VETTED: 1}]
    session.close()


def test_a_script_whose_file_is_unchanged_is_not_vetted_again(monkeypatch) -> None:
    session = ScriptedSession()
    session.run(spec_of(scripted(EngineConfig())(one_request)), "sim", {})
    monkeypatch.setattr(vetting, "run_in_child", lambda *_: pytest.fail("a script is vetted again"))
    (name,), digest = session._passed, pytest_session._digest(__file__)
    assert session.vet({name: (digest, {"a fault": 1})}) == {name: (digest, {"a fault": 1})}
    session.close()


def test_where_no_bug_was_met_nothing_is_said_of_bugs() -> None:
    met, unmet = (vetting.Findings(name="x", assertions=1, met=count) for count in (3, 0))
    assert dict(pytest_session._faults(met, has_windows=False)) == {NOTICES_NOTHING: 1}
    assert dict(pytest_session._faults(unmet, has_windows=False)) == {}


@pytest.mark.parametrize("kept", [[1], "text", {"a": 3}, {"a": []}, {"a": ["digest", {"never fails: x": "2"}]}])
def test_a_damaged_cache_has_no_verdicts(kept: object) -> None:
    """46.5: the scripts are vetted again, and the session ends as it would have."""
    config = SimpleNamespace(cache=SimpleNamespace(get=lambda _key, _default: kept))
    assert pytest_plugin._known_verdicts(config) == {}


def test_the_cache_keeps_verdicts() -> None:
    config = SimpleNamespace(cache=SimpleNamespace(get=lambda _key, _default: {"a": ["digest", {"x": 2}]}))
    assert pytest_plugin._known_verdicts(config) == {"a": ("digest", {"x": 2})}
