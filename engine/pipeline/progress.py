"""The progress of each stage, in memory that the stages share with the scheduler process, to find a stuck stage.

Writing it costs a stage nearly nothing; it is read only once a result is overdue. Decides nothing.
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

# A microbatch's number plus one, so that zeroed memory means no microbatch, and a phase.
_MARK: Final = struct.Struct("<qq")
# The same number, and when the stage began and ended that microbatch, for the latest microbatches.
_TIMES: Final = struct.Struct("<qdd")
_KEPT: Final = 64


class Phase(IntEnum):
    """A stage's work on the microbatch of its mark."""

    DONE = 0
    WAITING = 1
    COMPUTING = 2
    HANDING_ON = 3


_DOING: Final = {
    Phase.WAITING: "waits for the hidden states that the previous stage has sent",
    Phase.COMPUTING: "computes it",
    Phase.HANDING_ON: "hands on its hidden states",
}


class StageProgress:
    """One mark for each stage: its microbatch and its phase. Each stage writes only its own."""

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
        """Return when each stage began and ended a microbatch, in seconds; empty unless all of them have noted it."""
        every = [_TIMES.unpack_from(self._marks, self._place(stage, microbatch_id)) for stage in range(self._pp_size)]
        said = [(begun, ended) for number, begun, ended in every if number == microbatch_id + 1]
        return tuple(said) if len(said) == self._pp_size else ()

    def _place(self, stage: int, microbatch_id: int) -> int:
        return _MARK.size * self._pp_size + (stage * _KEPT + microbatch_id % _KEPT) * _TIMES.size

    def of(self, stage: int) -> tuple[int, Phase]:
        """Return a stage's microbatch, -1 before the first, and its phase."""
        number, phase = _MARK.unpack_from(self._marks, stage * _MARK.size)
        return number - 1, Phase(phase)

    def stuck(self, microbatch_id: int, pids: Sequence[int]) -> tuple[int, str]:
        """Find the stage that holds up an overdue microbatch, and describe its state.

        ``pids`` are the stages' processes in stage order, empty if unknown.
        """
        late = [stage for stage in range(self._pp_size) if not self._is_done(stage, microbatch_id)]
        for stage in late:
            if stage < len(pids) and _is_stopped(pids[stage]):
                return stage, "it is stopped by a signal"
        for stage in late:
            number, phase = self.of(stage)
            if phase is Phase.HANDING_ON and self._does_not_take(stage + 1, microbatch_id):
                continue
            return stage, f"it {_DOING[phase]}" if number == microbatch_id else "it has not begun it"
        return self._pp_size - 1, "every stage is done with it, so its result was lost on the way"

    def close(self) -> None:
        """Unmap the memory; idempotent."""
        self._marks.close()

    def _is_done(self, stage: int, microbatch_id: int) -> bool:
        number, phase = self.of(stage)
        return number > microbatch_id or (number == microbatch_id and phase is Phase.DONE)

    def _does_not_take(self, stage: int, microbatch_id: int) -> bool:
        """Return whether a stage does anything but wait for the hidden states of a microbatch."""
        return stage < self._pp_size and self.of(stage) != (microbatch_id, Phase.WAITING)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]
