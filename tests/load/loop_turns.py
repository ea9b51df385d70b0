"""Run by each process of a server, as its ``spoil.py``: measures the turns of event loops, as CPU time.

The longest turn so far is a number in the file that LOOP_TURNS names. Whoever reads it sets it back.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from asyncio.base_events import BaseEventLoop
from pathlib import Path

_LONGEST_S = struct.Struct("d")


def _measure(path: str) -> None:
    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), _LONGEST_S.size)
    run_once = BaseEventLoop._run_once  # type: ignore[attr-defined]  # the loop has no other place to ask

    def measured(loop: BaseEventLoop) -> None:
        begun_s = time.thread_time()
        run_once(loop)
        # Waiting for an event takes no CPU time.
        taken_s = time.thread_time() - begun_s
        if taken_s > _LONGEST_S.unpack_from(shared)[0]:
            _LONGEST_S.pack_into(shared, 0, taken_s)

    BaseEventLoop._run_once = measured  # type: ignore[attr-defined]


if "LOOP_TURNS" in os.environ:
    _measure(os.environ["LOOP_TURNS"])
