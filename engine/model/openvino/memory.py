"""Memory that a stage needs no more once it is compiled, given back to the system.

Owns when and how; what is given back is garbage, or can be read from its file again.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.model.file_pages import forget_pages, mapped_places

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
