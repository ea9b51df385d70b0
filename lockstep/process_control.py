"""What a process tells the kernel about itself and its parent: whose death ends it, whose parent it becomes, its name.

Linux alone. Starts and ends no process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
MAX_NAME_BYTES: Final = 15


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, even by kill -9.

    More exactly, when the parent's thread that started it ends.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent_pid:  # The parent died between the fork and the line above, so there will be no signal.
        os.kill(os.getpid(), number)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of orphaned descendants instead of init, or no longer."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def name_process(name: str) -> None:
    """Show the process as ``engine-NAME`` in lists of processes."""
    _prctl(_PR_SET_NAME, f"engine-{name}".encode()[:MAX_NAME_BYTES])


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
