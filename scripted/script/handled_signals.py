"""Asks Linux whether the main thread of another process is still handling a signal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

# Signals pending for the thread and for the process, and blocked ones: a signal is blocked while its handler runs.
_MASKS: Final = frozenset({"SigPnd", "ShdPnd", "SigBlk"})


def is_handling(pid: int, number: signal.Signals) -> bool:
    """Return whether the signal is pending or its handler runs. False for an ended process, and without ``/proc``.

    It may also be False between the two, so a caller must check the handler's first effect as well.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    masks = [value for name, _, value in (line.partition(":") for line in lines) if name in _MASKS]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
