"""Returns memory to the operating system: garbage, and pages of mapped files that this process has read.

Owns no file. A dropped page of a file is read again on demand.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Ranges of memory, as addresses and lengths.
Places = list[tuple[int, int]]


def mapped_places(files: Collection[Path], *, writable: bool = False) -> Places:
    """Return where in memory these files are mapped; their names must be resolved, as the system's are.

    ``writable`` includes writable mappings, for a caller that has written nothing there: writes would be lost.
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
    """Drop the pages in these places from this process's memory."""
    if not places:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, size in places:
        advise(first, size, mmap.MADV_DONTNEED)


# The period in seconds. Packing reads at most a gigabyte a second.
_INTERVAL_S: Final = 0.02


def give_back_garbage() -> None:
    """Collect garbage and return its memory to the system: allocators keep the memory of large conversions."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def read_pages_given_back(file: Path | None) -> Iterator[None]:
    """During a block, and at its end, drop the pages of a mapped file that this process has read.

    Compiling a graph and its first run repack the weights, and only the packed ones are read afterwards; otherwise the
    process would hold both.
    """
    places = [] if file is None else mapped_places([file])
    over = threading.Event()

    def give_back() -> None:
        while not over.wait(_INTERVAL_S):
            forget_pages(places)

    thread = threading.Thread(target=give_back, name="given-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        forget_pages(places)
