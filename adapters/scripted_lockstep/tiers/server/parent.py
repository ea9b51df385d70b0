"""The process that scripted servers fork from, which imports once what their gates need; and the end of a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import psutil

from engine.server.launch.preload import PreloadedParent

SCRIPTED_GATE: Final = "scripted_lockstep.tiers.server.gate:scripted_gate"
FOLLOWER_GATE: Final = "scripted_lockstep.tiers.server.follower:follower_gate"


@contextlib.contextmanager
def no_process_left(supervisor: int) -> Iterator[None]:
    """Around the end of a server: kill what is left of its processes, of its session, and of all that they started."""
    processes = set[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        processes.update(psutil.Process(supervisor).children(recursive=True))
    try:
        yield
    finally:
        for process in processes | set(_of_session(supervisor)):
            with contextlib.suppress(psutil.NoSuchProcess):  # its pid may be another one's by now
                process.kill()


def _of_session(leader: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                yield process


def start_parent() -> PreloadedParent:
    """Start it. Returns at once: the imports go on while the caller does other things."""
    return PreloadedParent.start(*(gate.partition(":")[0] for gate in (SCRIPTED_GATE, FOLLOWER_GATE)))
