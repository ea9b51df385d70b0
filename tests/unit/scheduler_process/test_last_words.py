"""The scheduler process at its end: it tells its reason before others can die of that end."""

from __future__ import annotations

import tempfile
from multiprocessing import Pipe
from pathlib import Path

import pytest

from engine.core.errors import ProcessDiedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.pipeline.staged import StagedPipeline
from engine.process.control import ChildMessage, Control, Dying, Ready, decode_child_message
from engine.process.settings import ServerSettings
from engine.server.scheduler_process import main
from engine.server.scheduler_process.gate_context import SchedulerPlace


def test_the_reason_is_told_before_the_stages_lose_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: last replies may take longer than the supervisor waits for a cause, and a stage blames the scheduler."""
    supervisor, theirs = Pipe()
    control, heard, close = Control(theirs), list[ChildMessage](), StagedPipeline.close

    def hearing(pipeline: StagedPipeline) -> None:
        while supervisor.poll(0):
            heard.append(decode_child_message(supervisor.recv_bytes()))
        close(pipeline)

    def stuck(*_: object) -> None:
        raise ProcessDiedError("stage-1", "it hangs")

    monkeypatch.setattr(StagedPipeline, "close", hearing)
    monkeypatch.setattr(main, "run_loop", stuck)
    settings = ServerSettings(pp_size=2)
    limits = Limits.of(settings, EMBEDDED_FACTS)
    with tempfile.TemporaryDirectory() as folder, supervisor:
        place = SchedulerPlace(settings=settings, limits=limits, private_dir=Path(folder), base_url="", stage_pids=())
        with pytest.raises(ProcessDiedError):
            main.run_scheduler(control, place)
        control.report_death(ZeroDivisionError())
        assert not supervisor.poll(0), "a process dies twice"
    control.close()
    ready, dying = heard
    assert ready == Ready()
    assert isinstance(dying, Dying)
    assert dying.victim_of == "stage-1"
