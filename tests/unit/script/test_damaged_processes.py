"""No change of a script to its process reaches the next script, and nothing that it started survives."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from damages import DAMAGES, do, finds_a_whole_engine, isolated
from forked_commands import ForkedCommands
from thinned import thinned

from engine import EngineConfig
from scripted import ScriptError, ScriptFailed
from scripted.core.refusals import HarnessError
from scripted.script.process_state import ProcessState


@pytest.mark.parametrize("damage", thinned(DAMAGES, one_in=6))
def test_a_damage_stays_in_the_child(damage: str) -> None:
    """D02: whether or not the script comes to its end."""

    def script(t):
        yield from finds_a_whole_engine(t)
        do(damage, t=t)

    state, draws = ProcessState(), (random.getstate(), np.random.get_state()[1].tolist())
    with contextlib.suppress(ScriptError, HarnessError):  # some damages keep it from its end
        isolated(script)
    assert state.changes() == []
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws


def test_a_changed_configuration_stays_in_the_child() -> None:
    config = EngineConfig()

    def script(t):
        yield
        assert t.state.step == 1
        object.__setattr__(config, "page_size", 7)

    assert isolated(script, config)["steps"] == 1
    assert config == EngineConfig()


def test_what_a_first_use_starts_is_no_failure() -> None:
    """46.11: threads of a pool, of asyncio, and what an import of torch sets."""

    def script(t):
        ThreadPoolExecutor(1).submit(int).result()
        assert asyncio.run(asyncio.to_thread(int)) == 0
        import torch

        assert torch.get_num_threads() > 0
        yield from finds_a_whole_engine(t)

    assert isolated(script)["compared"] == 1


def _crash() -> None:
    faulthandler.disable()  # Pytest's would print sixty lines of a crash that is meant.
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda: os._exit(3), "the script's process left with status 3"),
        (_crash, "the script's process was killed by SIGSEGV"),
    ],
    ids=["exits", "crashes"],
)
def test_a_script_that_ends_its_process_fails_alone(tmp_path: Path, end: Any, says: str) -> None:
    """And what it has started, in a session of its own too, ends with it."""
    pid_file = tmp_path / "pid"

    def script(t):
        yield
        if not (child := os.fork()):
            os.setsid()
            signal.pause()
        pid_file.write_text(str(child))
        end()
        assert t.state.step == 1

    with pytest.raises(ScriptFailed, match=says):
        isolated(script)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_what_it_says_is_heard_by_the_parent(capfd: Any, caplog: Any) -> None:
    def script(t):
        print("printed")  # noqa: T201
        print("to stderr", file=sys.stderr)  # noqa: T201
        logging.getLogger("of.a.script").warning("logged %d", 5)
        warnings.warn("warned", DeprecationWarning, stacklevel=1)
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()
        yield from finds_a_whole_engine(t)

    with pytest.warns() as caught:
        isolated(script)
    assert {str(one.message).rpartition(">.")[2] for one in caught} == {
        "warned",
        "<lambda> raised ZeroDivisionError where nothing can catch it",
    }
    assert {one.category for one in caught} == {DeprecationWarning, RuntimeWarning}
    assert capfd.readouterr() == ("printed\n", "to stderr\n")
    assert [(one.name, one.getMessage()) for one in caplog.records] == [("of.a.script", "logged 5")]


def test_a_copy_of_a_script_says_nothing() -> None:
    def script(t):
        yield from finds_a_whole_engine(t)
        os.fork()

    assert isolated(script)["steps"] > 1


def test_a_report_is_made_in_the_child_with_its_assertion() -> None:
    def script(t):
        r = t.start_req(prompt_len=4, max_new_tokens=2)
        yield from t.run_until_finished(r)
        assert len(r.output_ids) == 7

    with pytest.raises(ScriptError, match=r"assert 2 == 7\nE +.*where 2 = len\(") as failed:
        isolated(script)
    assert failed.value.report.log is not None


SESSION = """
import json
from pathlib import Path

import pytest

from engine import EngineConfig
from scripted import scripted


@pytest.fixture
def length():
    return 5


@pytest.mark.parametrize("tokens", [1, 2])
@scripted(EngineConfig(), tiers=("sim",))
def test_stops(t, length, tokens):
    r = t.start_req(prompt_len=length, max_new_tokens=tokens)
    yield from t.run_until_finished(r)
    if tokens == 2:
        breakpoint()
    assert len(r.output_ids) == tokens
"""


@pytest.mark.parametrize("options", thinned([["-s"], ["--pdb"], []], one_in=3), ids=["no capture", "pdb", "captured"])
def test_a_debugger_has_its_time_and_its_terminal(tmp_path: Path, options: list[str], commands: ForkedCommands) -> None:
    """46.11: the time of a script is not over while its user looks at it."""
    (tmp_path / "test_it.py").write_text(SESSION.replace('tiers=("sim",)', 'tiers=("sim",), timeout_s=0.5'))
    words = ["-m", "pytest", "-q", "--vet", "off", "-p", "no:cacheprovider", *options, str(tmp_path)]
    typed = "import time\ntime.sleep(1.2)\np tokens * 1000 + length\ncontinue\n"
    said = commands.run(*words, cwd=tmp_path, input=typed).stdout
    assert "2005" in said, said
    assert "2 passed" in said, said


def test_pytest_s_own_choices_of_tests_go_on(tmp_path: Path, commands: ForkedCommands) -> None:
    (tmp_path / "test_it.py").write_text(
        SESSION.replace("breakpoint()", "tokens = 7").replace('tiers=("sim",)', 'tiers=("sim",), must_reach=[]')
    )

    def session(*options: str) -> str:
        words = ["-m", "pytest", "-q", "--vet", "off", "--rootdir", tmp_path, *options, tmp_path]
        return commands.run(*words, cwd=tmp_path).stdout

    assert "1 failed, 1 passed" in session()
    junit = tmp_path / "report.xml"
    said = session("--lf", f"--junit-xml={junit}")
    assert "1 failed" in said
    assert "passed" not in said
    assert "assert 2 == 7" in said
    assert "assert 2 == 7" in junit.read_text()
