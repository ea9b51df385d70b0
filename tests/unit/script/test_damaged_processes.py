"""A script that leaves its process changed fails by name, and the process is as it was for the next one."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import msgspec
import pytest

from engine import EngineConfig
from engine.scheduler import Books, Scheduler
from scripted import ScriptedSim, ScriptFailed, ScriptOptions
from scripted.script.process_state import ProcessState

OPTIONS = ScriptOptions(must_assert=True)
STOP = threading.Event()


def _patches_a_method(t):
    Books.is_quiescent = property(lambda books: True)


def _adds_a_method(t):
    Scheduler.helps = lambda scheduler: None


def _sets_a_variable(t):
    os.environ["LEFT_BEHIND"] = "1"


def _moves(t):
    os.chdir("/")


def _stops_the_collector(t):
    gc.disable()


def _stops_the_clock(t):
    time.monotonic = lambda: 0.0


def _ignores_interrupts(t):
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _allows_recursion(t):
    sys.setrecursionlimit(5000)


def _ignores_warnings(t):
    warnings.simplefilter("ignore")


def _closes_a_descriptor(t):
    os.close(0)


def _leaves_a_thread(t):
    threading.Thread(target=STOP.wait, daemon=True).start()


def _changes_limits(t):
    limits = t.scheduler.limits
    msgspec.structs.force_setattr(limits, limits.__struct_fields__[-1], "changed")


DAMAGES = {
    _patches_a_method: "Books.is_quiescent",
    _adds_a_method: "Scheduler.helps, which is new",
    _sets_a_variable: r"os.environ \(LEFT_BEHIND\)",
    _moves: r"the working folder \(/\)",
    _stops_the_collector: "the garbage collector",
    _stops_the_clock: "time.monotonic",
    _ignores_interrupts: "signal handlers",
    _allows_recursion: "the recursion limit",
    _ignores_warnings: "the filters of warnings",
    _closes_a_descriptor: "descriptor 0",
    _leaves_a_thread: "a thread, .*, still runs",
    _changes_limits: r"the engine's limits \(t.scheduler.limits\)",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_the_guilty_script_fails_and_the_next_one_finds_nothing(damage: Any) -> None:
    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"
        damage(t)

    def innocent(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"

    before = ProcessState(descriptors=False)
    try:
        with ScriptedSim.start(EngineConfig()) as sim:
            with pytest.raises(ScriptFailed, match=f"the script left its process changed: .*{DAMAGES[damage]}"):
                sim.run(script, options=OPTIONS)
            STOP.set()
            sim.run(innocent, options=OPTIONS)
        assert before.put_back() == []
    finally:
        before.put_back()
        STOP.clear()


def test_what_a_script_puts_back_is_no_damage() -> None:
    def script(t):
        os.environ["LEFT_BEHIND"] = "1"
        try:
            yield
        finally:
            del os.environ["LEFT_BEHIND"]
        assert "LEFT_BEHIND" not in os.environ

    with ScriptedSim.start(EngineConfig()) as sim:
        assert sim.run(script, options=OPTIONS).steps == 1


def test_a_failing_script_is_put_back_as_well() -> None:
    def script(t):
        yield
        os.environ["LEFT_BEHIND"] = "1"
        assert t.state.step == 7

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match="7"):
        sim.run(script, options=OPTIONS)
    assert "LEFT_BEHIND" not in os.environ
