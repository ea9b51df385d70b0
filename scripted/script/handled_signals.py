"""Tells whether another process still handles a signal, by what Linux says of its main thread."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

# Signals that wait for the thread or for the process, and those that are blocked, as each is while its handler runs.
_MASKS: Final = frozenset({"SigPnd", "ShdPnd", "SigBlk"})


def is_handling(pid: int, number: signal.Signals) -> bool:
    """Return whether the signal waits or its handler runs. False for a process that has ended, and without ``/proc``.

    Between the two it can be False as well, so that a caller must also see what the handler has begun.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    masks = [value for name, _, value in (line.partition(":") for line in lines) if name in _MASKS]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
