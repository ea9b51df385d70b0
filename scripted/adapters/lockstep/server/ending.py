"""The end of a server: of all its processes, whatever they have become."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil


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
