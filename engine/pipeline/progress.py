"""How far each stage has come, in memory that the stages share with the scheduler process: who is stuck, if one is.

A stage notes what it is doing at no cost worth measuring; it is read only once a result is overdue. Decides nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

from engine.process.private_dir import PROGRESS_FILE

# A microbatch's number, one more so that new memory stands for none, and a phase.
_MARK: Final = struct.Struct("<qq")
# The same number, and when the stage began and ended with it, for each of the last microbatches.
_TIMES: Final = struct.Struct("<qdd")
_KEPT: Final = 64


class Phase(IntEnum):
    """What a stage does with the microbatch of its mark."""

    DONE = 0
    WAITING = 1
    COMPUTING = 2
    HANDING_ON = 3


_DOING: Final = {
    Phase.WAITING: "waits for the hidden states of the stage before, which has handed them on",
    Phase.COMPUTING: "computes it",
    Phase.HANDING_ON: "hands on its hidden states",
}


class StageProgress:
    """One mark a stage: a microbatch, and what the stage does with it. Each stage writes its own."""

    def __init__(self, private_dir: Path, pp_size: int) -> None:
        self._pp_size = pp_size
        size = (_MARK.size + _KEPT * _TIMES.size) * pp_size
        file = os.open(private_dir / PROGRESS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            self._marks = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._begun_s = 0.0

    def note(self, stage: int, microbatch_id: int, phase: Phase) -> None:
        _MARK.pack_into(self._marks, stage * _MARK.size, microbatch_id + 1, phase)
        if phase is Phase.COMPUTING:
            self._begun_s = time.monotonic()
        elif phase is Phase.HANDING_ON:
            _TIMES.pack_into(
                self._marks, self._place(stage, microbatch_id), microbatch_id + 1, self._begun_s, time.monotonic()
            )

    def times(self, microbatch_id: int) -> tuple[tuple[float, float], ...]:
        """When each stage began and ended with a microbatch, in seconds; empty where one of them has not said so."""
        every = [_TIMES.unpack_from(self._marks, self._place(stage, microbatch_id)) for stage in range(self._pp_size)]
        said = [(begun, ended) for number, begun, ended in every if number == microbatch_id + 1]
        return tuple(said) if len(said) == self._pp_size else ()

    def _place(self, stage: int, microbatch_id: int) -> int:
        return _MARK.size * self._pp_size + (stage * _KEPT + microbatch_id % _KEPT) * _TIMES.size

    def of(self, stage: int) -> tuple[int, Phase]:
        """What a stage said last; -1 before its first microbatch."""
        number, phase = _MARK.unpack_from(self._marks, stage * _MARK.size)
        return number - 1, Phase(phase)

    def stuck(self, microbatch_id: int, pids: Sequence[int]) -> tuple[int, str]:
        """The stage that keeps a microbatch from coming back, and what it does, when its result is overdue.

        ``pids`` are the stages' processes, in stage order; empty where they are not known.
        """
        late = [stage for stage in range(self._pp_size) if not self._is_done(stage, microbatch_id)]
        for stage in late:
            if stage < len(pids) and _is_stopped(pids[stage]):
                return stage, "it is stopped by a signal"
        for stage in late:
            number, phase = self.of(stage)
            if phase is Phase.HANDING_ON and self._does_not_take(stage + 1, microbatch_id):
                continue
            return stage, f"it {_DOING[phase]}" if number == microbatch_id else "it has not begun with it"
        return self._pp_size - 1, "every stage is done with it, so that its result was lost on the way"

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        self._marks.close()

    def _is_done(self, stage: int, microbatch_id: int) -> bool:
        number, phase = self.of(stage)
        return number > microbatch_id or (number == microbatch_id and phase is Phase.DONE)

    def _does_not_take(self, stage: int, microbatch_id: int) -> bool:
        """True when a stage does something else than to wait for the hidden states of a microbatch."""
        return stage < self._pp_size and self.of(stage) != (microbatch_id, Phase.WAITING)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, where the system says so."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]
