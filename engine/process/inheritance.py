"""The first acts of a forked process: its parent's files and stdin.

Owns no process. Every process that the engine forks calls these functions before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

STANDARD_FILES = (0, 1, 2)


def close_inherited_files(keep: Sequence[int]) -> None:
    """Close every file descriptor above the standard ones except those to keep.

    If the pipe end of another process stayed open here, it would hide that process's death.
    """
    kept = sorted({*STANDARD_FILES, *keep})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def take_no_input() -> None:
    """Give the process an empty stdin, so that a library that prompts its user does not wait."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != STANDARD_FILES[0]:
        os.dup2(nothing, STANDARD_FILES[0])
        os.close(nothing)
