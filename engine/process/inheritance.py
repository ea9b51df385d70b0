"""The first acts of a forked process: its parent's files and death, its own name.

Owns no process. Every process that the engine forks calls these functions before anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MAX_NAME_BYTES = 15
STANDARD_FILES = (0, 1, 2)


def close_inherited_files(keep: Sequence[int]) -> None:
    """Close every file descriptor above the standard ones except those to keep.

    If the pipe end of another process stayed open here, it would hide that process's death.
    """
    kept = sorted({*STANDARD_FILES, *keep})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, even by kill -9."""
    _prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent_pid:  # The parent died between the fork and the line above, so there will be no signal.
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, instead of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Show the process as ``engine-NAME`` in lists of processes."""
    _prctl(PR_SET_NAME, f"engine-{name}".encode()[:MAX_NAME_BYTES])


def take_no_input() -> None:
    """Give the process an empty stdin, so that a library that prompts its user does not wait."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != STANDARD_FILES[0]:
        os.dup2(nothing, STANDARD_FILES[0])
        os.close(nothing)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
