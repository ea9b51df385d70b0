"""Pages of mapped files that this process has read: where they are, and giving them back to the system.

Owns no file. What is given back is read from its file again when it is needed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection
from pathlib import Path

# Addresses and lengths.
Places = list[tuple[int, int]]


def mapped_places(files: Collection[Path], *, writable: bool = False) -> Places:
    """Where in memory files are mapped, named as the system does: resolved.

    ``writable`` takes in places that could be written into, for a caller who knows that none was: what was written
    would be lost.
    """
    names = set(map(str, files))
    places = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names and (writable or "w" not in fields[1]):
            first, last = (int(end, 16) for end in fields[0].split("-"))
            places.append((first, last - first))
    return places


def forget_pages(places: Places) -> None:
    """Let the system take back the pages in these places."""
    if not places:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, size in places:
        advise(first, size, mmap.MADV_DONTNEED)
