"""The process that the servers of all tests fork from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_lockstep.tiers.server.parent import start_parent

from engine.server.launch.preload import PreloadedParent

SPOILING = str(Path(__file__).parent / "unit" / "spoiling")


@pytest.fixture(scope="session")
def parent() -> Iterator[PreloadedParent]:
    """One a session: it imports torch, which takes longer than to fork a server.

    A test that breaks processes of its servers writes a ``spoil.py`` and starts them from the folder that it is in.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SPOILING + os.pathsep + os.environ.get("PYTHONPATH", ""))
        started = start_parent()
    with started:
        yield started
