"""The agent of a stage judges how the stage's process has ended."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.process.control import ProcessDied, Shutdown
from engine.process.death import EXIT_FAILED
from engine.process.links.endpoint import Endpoint
from engine.process.links.secret import Secret
from engine.server.launch.agent import EXIT_OK, Agent
from engine.server.placement.messages import StageOrder


@pytest.fixture
def agent() -> Iterator[Any]:
    """An agent that is joined to a server which says nothing, with a stage that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    signals, other = socket.socketpair()
    one: Any = Agent(StageOrder(join=Endpoint("127.0.0.1", 1)), Secret.new(), near, signals)  # type: ignore[arg-type]
    with far, signals, other:
        try:
            yield one
        finally:
            one._child = None  # It has no process to wait for.
            one.close()


def ends(agent: Any, status: int) -> None:
    """Let the process of its stage end with this status."""
    pipe, other = socket.socketpair()
    with pipe, other:
        closed = SimpleNamespace(fileno=pipe.fileno, name="stage-0", alive=False, status=status, dying=None)
        closed.listen = lambda: None
        agent._child = closed
        agent._selector.register(closed, selectors.EVENT_READ)
        agent._on_stage()


def test_a_stage_whose_plans_ended_in_order_is_not_dead(agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A07: its plans end on one connection, and the server's word comes on another, which may be slower."""
    ends(agent, 0)
    assert agent.over is None
    agent.obey(Shutdown())
    assert agent.over == EXIT_OK
    assert capsys.readouterr().err == ""


def test_a_stage_that_ended_by_itself_is_the_servers_to_judge(agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A06: a status of 0 that the server does not expect ends all, with its cause."""
    ends(agent, 0)
    agent.obey(ProcessDied(process="stage-0", cause="it exited with status 0"))
    assert agent.over == EXIT_FAILED
    assert "stage-0" in capsys.readouterr().err


@pytest.mark.parametrize("status", [1, -9])
def test_a_stage_that_failed_is_dead_at_once(agent: Any, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The death of a stage is reported with its cause (A06)."""
    ends(agent, status)
    assert agent.over == EXIT_FAILED
    assert "the stage-0 process died" in capsys.readouterr().err
