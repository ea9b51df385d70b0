"""The agent of a stage judges how the stage's process has ended."""

from __future__ import annotations

import selectors
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.process.control import ProcessDied, Shutdown
from engine.process.death import EXIT_FAILED
from engine.server.launch.agent import EXIT_OK, _Agent
from engine.server.placement.messages import Ended


def _agent(status: int) -> Any:
    agent: Any = object.__new__(_Agent)
    agent._child = SimpleNamespace(name="stage-0", alive=False, status=status, dying=None, listen=lambda: None)
    agent._link, agent._selector = Mock(), Mock(spec=selectors.BaseSelector)
    agent._was_told, agent._over = False, None
    return agent


def test_a_stage_whose_plans_ended_in_order_is_not_dead(capsys: pytest.CaptureFixture[str]) -> None:
    """B05: its plans end on one connection, and the server's word comes on another, which may be slower."""
    agent = _agent(0)
    agent._on_stage()
    agent._link.send.assert_called_once_with(Ended(0))
    assert agent._over is None
    agent._obey(Shutdown())
    assert agent._over == EXIT_OK
    assert capsys.readouterr().err == ""


def test_a_stage_that_ended_by_itself_is_the_servers_to_judge(capsys: pytest.CaptureFixture[str]) -> None:
    """B05: a status of 0 that the server does not expect ends all, with its cause."""
    agent = _agent(0)
    agent._on_stage()
    agent._obey(ProcessDied(process="stage-0", cause="it exited with status 0"))
    assert agent._over == EXIT_FAILED
    assert "stage-0" in capsys.readouterr().err


@pytest.mark.parametrize("status", [1, -9])
def test_a_stage_that_failed_is_dead_at_once(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """B05."""
    agent = _agent(status)
    agent._on_stage()
    assert agent._over == EXIT_FAILED
    assert "the stage-0 process died" in capsys.readouterr().err
