"""The preloaded process that scripted servers fork from, and the end of a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import psutil

from engine.server.launch.preload import PreloadedParent

SCRIPTED_GATE: Final = "scripted_lockstep.tiers.server.gate:scripted_gate"
FOLLOWER_GATE: Final = "scripted_lockstep.tiers.server.follower:follower_gate"
# Besides the gates: modules that every server imports for its first client, script, assertion and grammar.
_LATER: Final = ("httpcore", "scripted_lockstep.adapter", "pytest", "_pytest.assertion.rewrite", "llguidance")


@contextlib.contextmanager
def no_process_left(supervisor: int) -> Iterator[None]:
    """Kill all remaining processes of a server, their session, and their children."""
    processes = set[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        processes.update(psutil.Process(supervisor).children(recursive=True))
    try:
        yield
    finally:
        for process in processes | set(_of_session(supervisor)):
            with contextlib.suppress(psutil.NoSuchProcess):  # Its pid may belong to another process by now.
                process.kill()


def _of_session(leader: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                yield process


def start_parent() -> PreloadedParent:
    """Start the process without waiting for its imports."""
    return PreloadedParent.start(*(gate.partition(":")[0] for gate in (SCRIPTED_GATE, FOLLOWER_GATE)), *_LATER)
