"""Memory that a stage needs no more once it is compiled, given back to the system.

Owns when and how; what is given back is garbage, or can be read from its file again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["give_back_garbage", "read_pages_given_back"]

# A second of packing reads a gigabyte or less.
_INTERVAL_S: Final = 0.02


def give_back_garbage() -> None:
    """Collect what is unreachable, and hand its memory over: allocators keep what large conversions have freed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def read_pages_given_back(file: Path | None) -> Iterator[None]:
    """For the length of a block, and at its end, give back what this process has read of a file that is mapped.

    Weights are packed anew when a graph is compiled and first computed, and are read from there afterwards; without
    this the process would hold both by then.
    """
    places = [] if file is None else _mapped(file)
    over = threading.Event()

    def give_back() -> None:
        while not over.wait(_INTERVAL_S):
            _forget(places)

    thread = threading.Thread(target=give_back, name="given-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _forget(places)


def _mapped(file: Path) -> list[tuple[int, int]]:
    """Where in memory a file is mapped, as addresses and lengths. Linux only, else none."""
    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.is_file():
        return []
    places = []
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        # Never a mapping that was written into: what was written would be lost.
        if len(fields) == 6 and fields[5] == str(file) and "w" not in fields[1]:
            first, last = (int(end, 16) for end in fields[0].split("-"))
            places.append((first, last - first))
    return places


def _forget(places: Sequence[tuple[int, int]]) -> None:
    """Let the system take back pages of mapped files; what is read again comes back."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, size in places:
        advise(first, size, mmap.MADV_DONTNEED)
