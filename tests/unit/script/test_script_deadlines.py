"""A script in sim is bounded by its ``timeout_s``, regardless of the exceptions it catches and the timers it sets."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from damages import isolated
from scripted_lockstep.tiers.sim import runner
from thinned import thinned

from engine import EngineConfig
from scripted import ScriptedSim, ScriptFailed, ScriptTimeout
from scripted.script import hard_deadline, watchdog

TIMEOUT_S = 0.2


@pytest.fixture(autouse=True)
def _strikes_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_AGAIN_S", 0.1)


def _catches_exceptions(t):
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001
            pass
    yield


def _catches_everything(t):
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001
            pass
    yield


def _catches_everything_in_three_loops(t):
    number = 0
    while True:
        try:
            while True:
                try:
                    while True:
                        try:
                            while True:
                                number += 1
                        except BaseException:  # noqa: BLE001
                            continue
                except BaseException:  # noqa: BLE001
                    number = 1
        except BaseException:  # noqa: BLE001
            pass
    yield


def _calls_itself_from_a_handler(t):
    def again():
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            again()

    again()
    yield


def _has_an_alarm_of_its_own(t):
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(60)
    yield


def _handles_every_signal(t):
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(number, lambda *_: None)
    while True:
        try:  # noqa: SIM105
            time.sleep(0.01)
        except BaseException:  # noqa: BLE001
            pass
    yield


def _stays_in_a_call_of_c(t):
    total = sum(range(10**12))
    assert total
    yield


def _catches_it_at_each_yield(t):
    while True:
        try:
            yield
            time.sleep(0.1)
        except BaseException:  # noqa: BLE001
            pass


def _catches_it_once_and_ends(t):
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001
        yield


def _never_leaves_a_finally(t):
    try:
        time.sleep(60)
    finally:
        while True:
            try:  # noqa: SIM105
                time.sleep(0.01)
            except BaseException:  # noqa: BLE001
                pass
    yield


SCRIPTS = [
    function for name, function in list(globals().items()) if name.startswith("_") and hasattr(function, "__code__")
]


def _ends(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until_finished(r)


@pytest.fixture
def sim():
    with ScriptedSim.start(EngineConfig()) as sim:
        yield sim


@pytest.mark.parametrize("script", thinned(SCRIPTS, one_in=3), ids=lambda script: script.__name__.strip("_"))
def test_a_script_ends_in_its_time(script: Any) -> None:
    with pytest.raises(ScriptTimeout, match=f"timeout_s={TIMEOUT_S}") as failed:
        isolated(script, timeout_s=TIMEOUT_S)
    assert f"in {script.__name__}" in str(failed.value)


def test_a_script_that_is_killed_says_where_it_was() -> None:
    with pytest.raises(ScriptTimeout) as failed:
        isolated(_stays_in_a_call_of_c, timeout_s=TIMEOUT_S)
    assert ">       total = sum(range(10**12))" in str(failed.value)
    assert "The script itself does not come to its next yield" in str(failed.value)


@pytest.mark.parametrize(("is_slow", "where"), [("new_engine", "_catches_exceptions"), ("EngineRun", "slow")])
def test_a_deadline_meets_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch, is_slow: str, where: str) -> None:
    """Building the engine takes none of the script's time; a deadline in the rest of the start is its timeout."""
    real = getattr(runner, is_slow)
    begun: list[float] = []

    def slow(*args: object) -> object:
        begun.append(time.monotonic())
        while time.monotonic() < begun[0] + 2 * TIMEOUT_S:
            pass
        return real(*args)

    monkeypatch.setattr(runner, is_slow, slow)
    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptTimeout) as failed:
        sim.run(_catches_exceptions, timeout_s=TIMEOUT_S)
    assert len(begun) == 1
    assert f"in {where}" in str(failed.value)


def test_a_script_of_another_thread_ends_in_its_time() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            isolated(_catches_everything, timeout_s=TIMEOUT_S)
        except ScriptTimeout as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert len(errors) == 1


@pytest.mark.parametrize("script", [_catches_exceptions, _catches_it_once_and_ends], ids=lambda one: one.__name__)
def test_by_hand_a_script_that_catches_exceptions_ends_in_its_time(sim: ScriptedSim, script: Any) -> None:
    with pytest.raises(ScriptTimeout, match=f"timeout_s={TIMEOUT_S}"):
        sim.run(script, timeout_s=TIMEOUT_S)
    assert sim.run(_ends).compared == 1


def test_a_finally_that_yields_is_run_at_once_and_in_no_other_script(sim: ScriptedSim) -> None:
    steps: list[str] = []

    def refused(t):
        try:
            yield 5
        finally:
            steps.append("cleans up")
            try:
                yield from t.run_until_idle()
            finally:
                yield
                steps.append("ends")

    with pytest.raises(ScriptFailed, match="a script yields nothing, got 5"):
        sim.run(refused)
    assert steps == ["cleans up", "ends"] or steps == ["cleans up"]
    assert sim.run(_ends).compared == 1


def test_a_tracer_of_the_tests_goes_on(sim: ScriptedSim) -> None:
    """A debugger or a coverage tool, which once made the interpreter look for strikes forever."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        sim.run(_ends)
    finally:
        sys.setprofile(None)
    assert calls


def test_a_script_by_hand_has_the_outcome_of_this_process_in_a_child(sim):
    """46.11"""
    here, isolated = sim.run(_ends), sim.run_isolated(_ends)
    assert isolated == here
    assert isolated.digest


def test_a_script_by_hand_is_bounded_in_a_call_of_c_in_a_child(sim):
    """46.11"""
    with pytest.raises(ScriptTimeout) as failed:
        sim.run_isolated(_stays_in_a_call_of_c, timeout_s=1)
    assert ">       total = sum(range(10**12))" in str(failed.value)


def test_a_script_by_hand_that_stays_in_a_call_of_c_ends_its_process_with_its_line(
    sim: ScriptedSim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It computed forever, and ignored Ctrl-C."""
    monkeypatch.setattr(hard_deadline, "_PATIENCE_S", 0.0)
    stacks = tmp_path / "stacks"
    child = os.fork()
    if not child:
        try:
            with stacks.open("w") as file:
                hard_deadline.write_stacks_to(file.fileno())
                sim.run(_stays_in_a_call_of_c, timeout_s=1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -hard_deadline.DEADLINE_SIGNAL
    assert "in _stays_in_a_call_of_c" in stacks.read_text()


def test_a_script_by_hand_leaves_no_timer(sim: ScriptedSim) -> None:
    timers = Path("/proc/self/timers")
    before = timers.read_text()
    sim.run(_ends)
    assert timers.read_text() == before
