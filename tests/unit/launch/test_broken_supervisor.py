"""A supervisor with any defect: its processes get the cause, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.core.errors import ProcessDiedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.process.control import Control, ProcessDied, Ready
from engine.process.death import read_death_report
from engine.process.links.listener import bind_server
from engine.process.private_dir import PrivateDir
from engine.process.settings import ServerSettings
from engine.server.launch import supervisor
from engine.server.launch.announcement import Phases, StartView
from engine.server.launch.child import fork_child

PATIENCE_S = 30.0


def ends_when_told(folder: Path, name: str, control: Control) -> None:
    control.send(Ready())
    control.wait_until_serving(PATIENCE_S)
    death = control.receive(PATIENCE_S)
    assert isinstance(death, ProcessDied), death
    # As a front end that has told its clients does, and a scheduler.
    (folder / name).write_text(f"{death.process}: {death.cause}")
    raise ProcessDiedError(death.process, death.cause)


def hangs(control: Control) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control.send(Ready())
    time.sleep(10 * PATIENCE_S)


def test_a_defect_of_the_supervisor_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A06: the supervisor treated its own defect as an order to stop, and cut every stream without an error."""
    broken: list[bool] = []
    mains: dict[str, Callable[[Control], None]] = {
        name: functools.partial(ends_when_told, tmp_path, name) for name in (supervisor.SCHEDULER, supervisor.FRONTEND)
    }
    mains["stage-0"] = hangs

    def start(self: Any) -> None:
        for name, main in mains.items():
            self._adopt(fork_child(name, main))

    def tend(self: Any, now: float) -> None:
        if broken:
            raise KeyError("a defect")

    def serving(_: object) -> None:
        broken.append(True)
        os.kill(os.getpid(), signal.SIGCHLD)

    monkeypatch.setattr(supervisor._Supervisor, "_start", start)
    monkeypatch.setattr(supervisor._Supervisor, "_tend", tend)
    settings = ServerSettings(port=0)
    limits = Limits.of(settings, EMBEDDED_FACTS)
    with bind_server("127.0.0.1", 0) as listener:
        view = StartView(settings, EMBEDDED_FACTS, limits, 0.0, Phases(), serving)
        one = supervisor._Supervisor(settings, EMBEDDED_FACTS, limits, listener, PrivateDir(tmp_path), view)
        assert one.run() == 1
    for name in (supervisor.SCHEDULER, supervisor.FRONTEND):
        assert (tmp_path / name).read_text().startswith("supervisor: Traceback")
    report = read_death_report(tmp_path)
    assert report is not None
    assert (report.process, report.pid, report.exit_code) == ("supervisor", os.getpid(), 1)
    assert "KeyError: 'a defect'" in report.cause
    assert capfd.readouterr().err.count("error: Traceback") == 1
    assert not [child for child in psutil.Process().children() if child.pid in {c.pid for c in one._children}]
