"""Memory that a stage needs no more once it is compiled, given back to the system.

Owns when and how; what is given back is garbage, or can be read from its file again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

__all__ = ["forget_read_pages", "give_back_garbage"]


def give_back_garbage() -> None:
    """Collect what is unreachable, and hand its memory over: allocators keep what large conversions have freed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_read_pages(file: Path) -> None:
    """Let the system take back the pages of a mapped file that this process has read; what is read again comes back.

    Weights are packed anew when a graph is compiled, and then read from there. Linux only, else a no-op.
    """
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        # Never a mapping that was written into: what was written would be lost.
        if len(fields) == 6 and fields[5] == str(file) and "w" not in fields[1]:
            first, last = (int(end, 16) for end in fields[0].split("-"))
            advise(first, last - first, mmap.MADV_DONTNEED)
