"""The process that the servers and the commands of all tests fork from."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from scripted_lockstep.tiers.server.parent import FOLLOWER_GATE, SCRIPTED_GATE

from engine.server.launch.preload import PreloadedParent

SPOILING = str(Path(__file__).parent / "unit" / "spoiling")


# Others end no process, or belong to pytest.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """Every process that a later test forks would inherit a handler that a test leaves behind."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    left = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    for number in left:
        signal.signal(number, before[number])
    assert not left, f"the test has left handlers of {', '.join(number.name for number in left)}"


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
