"""A script that leaves its process changed fails by name, and the process is as it was for the next one."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import os
import random
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from damages import DAMAGES, DESCRIPTORS, OPTIONS, STOP, do, finds_a_whole_engine

from engine import EngineConfig
from scripted import ScriptedSim, ScriptError, ScriptFailed
from scripted.script.process_state import ProcessState


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_guilty_script_fails_and_the_next_one_finds_nothing(damage: str) -> None:
    def script(t):
        yield from finds_a_whole_engine(t)
        do(damage, t=t)

    before = ProcessState(standard_files=True)
    try:
        with ScriptedSim.start(EngineConfig()) as sim:
            with pytest.raises(ScriptFailed, match=f"the script left its process changed: .*{DAMAGES[damage]}"):
                sim.run(script, options=OPTIONS)
            STOP.set()
            sim.run(finds_a_whole_engine, options=OPTIONS)
        assert before.put_back() == []
    finally:
        before.put_back()
        STOP.clear()
        while DESCRIPTORS:
            os.close(DESCRIPTORS.pop())


def _replaces_builtins(t):
    # None that a thread of pytest's workers needs meanwhile.
    builtins.sorted = builtins.zip = builtins.enumerate = None


def _fills_descriptors(t):
    for number in range(3, 100):
        os.dup2(0, number)


@pytest.mark.parametrize("damage", [_replaces_builtins, _fills_descriptors])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_failure_is_reported_from_a_process_that_is_put_back(damage: Any, steps: int) -> None:
    """What a report is made with, and the copies that all is put back from, may be what the script has replaced."""

    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield
        with contextlib.suppress(OSError):
            damage(t)
        for _ in range(steps):
            yield
        assert r.finish_reason == "stop"

    before = ProcessState(standard_files=True)
    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptError) as failed:
        sim.run(script, options=OPTIONS)
    assert "damage(t)" in str(failed.value) or "yield" in str(failed.value) or "assert r" in str(failed.value)
    assert before.put_back() == []


@pytest.mark.parametrize("call", [(sys, "addaudithook"), (os, "register_at_fork")], ids=lambda call: call[1])
def test_what_nobody_can_take_back_is_refused(call: tuple[Any, str]) -> None:
    def script(t):
        yield
        getattr(*call)(lambda *_: None)

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match=f"{call[1]} cannot be taken back"):
        sim.run(script, options=OPTIONS)


def test_a_changed_configuration_is_named_and_put_back() -> None:
    config = EngineConfig()

    def script(t):
        yield
        assert t.state.step == 1
        object.__setattr__(config, "page_size", 7)

    with ScriptedSim.start(config) as sim, pytest.raises(ScriptFailed, match=r"its configuration \(page_size\)"):
        sim.run(script, options=OPTIONS)
    assert config == EngineConfig()


def test_what_a_destructor_raises_is_named() -> None:
    class Raises:
        def __del__(self) -> None:
            raise ValueError

    def script(t):
        yield
        assert t.state.step == 1
        Raises()

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match=r"Raises.__del__ raised Val"):
        sim.run(script, options=OPTIONS)


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


def test_a_thread_that_spins_is_ended() -> None:
    def script(t):
        yield
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], name="spins", daemon=True).start()
        assert t.state.step == 1

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match="a thread, spins, still runs"):
        sim.run(script, options=OPTIONS)
    for thread in threading.enumerate():
        if thread.name == "spins":
            thread.join(10)
            assert not thread.is_alive()


def test_what_one_script_left_open_is_not_closed_by_the_next() -> None:
    """The collector closes it, whenever that is."""
    left = []

    def leaves(t):
        left.append(socket.create_server(("127.0.0.1", 0)))
        yield
        assert t.state.step == 1

    def innocent(t):
        yield
        left.pop().close()
        assert t.state.step == 1

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(leaves, options=OPTIONS)
        sim.run(innocent, options=OPTIONS)
        assert not left


def test_a_failing_script_is_put_back_as_well() -> None:
    def script(t):
        yield
        os.environ["LEFT_BEHIND"] = "1"
        assert t.state.step == 7

    with ScriptedSim.start(EngineConfig()) as sim, pytest.raises(ScriptFailed, match="7"):
        sim.run(script, options=OPTIONS)
    assert "LEFT_BEHIND" not in os.environ


def test_a_dump_that_ends_the_process_is_called_off() -> None:
    """It cannot be seen, so nobody is told."""

    def script(t):
        t.smoke()
        faulthandler.dump_traceback_later(0.3, exit=True)
        yield

    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(script, options=OPTIONS)
    time.sleep(0.6)


def test_the_next_script_draws_what_it_would_have_drawn() -> None:
    def seeds(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert r.finish_reason == "length"
        random.seed(1)
        np.random.seed(1)

    random.seed(7)
    np.random.seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).random()
    with ScriptedSim.start(EngineConfig()) as sim:
        sim.run(seeds, options=OPTIONS)
    assert (random.random(), np.random.random()) == expected
