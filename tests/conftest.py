"""The process that the servers and the commands of all tests fork from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import signal_handlers
from forked_commands import ForkedCommands
from scripted_lockstep.tiers.server.parent import FOLLOWER_GATE, SCRIPTED_GATE

from engine.server.launch.preload import PreloadedParent

SPOILING = str(Path(__file__).parent / "unit" / "spoiling")


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """A test must not leave a handler to the tests after it, and to the processes that they fork."""
    with signal_handlers.restored() as changed:
        yield
    assert not changed, f"the test has left handlers of {', '.join(changed)}; request restores_signal_handlers"


@pytest.fixture
def restores_signal_handlers() -> Iterator[None]:
    """For a test that runs code which handles signals until its process ends."""
    with signal_handlers.restored():
        yield


@pytest.fixture(scope="session")
def commands() -> Iterator[ForkedCommands]:
    """One a session: it imports torch and pytest, which takes longer than most commands."""
    with ForkedCommands.begin() as begun:
        yield begun


@pytest.fixture(scope="session")
def parent(commands: ForkedCommands) -> Iterator[PreloadedParent]:
    """One a session, forked from the process that has imported what servers need.

    A test that breaks processes of its servers writes a ``spoil.py`` and starts them from the folder that it is in.
    """
    modules = [gate.partition(":")[0] for gate in (SCRIPTED_GATE, FOLLOWER_GATE)]
    path = SPOILING + os.pathsep + os.environ.get("PYTHONPATH", "")
    with commands.start_parent(*modules, "spoiled_forks", env=os.environ | {"PYTHONPATH": path}) as started:
        yield started
