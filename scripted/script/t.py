"""``t``: what a script is given. One object a script; queries, waits and verbs in a file each.

It lives in the scheduler's process, inside the gate, so it sees the live scheduler; it keeps no state of the engine.
"""

from __future__ import annotations

from typing import NoReturn, cast

from scripted.errors import BadCall
from scripted.report.trace import Note
from scripted.rig.rig import Rig
from scripted.script.verbs import Verbs

__all__ = ["ScriptContext"]


class _EndedRig:
    """Stands for the rig of a script that has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BadCall("this t belongs to a script that has ended; use the t that the running script was given")


class ScriptContext(Verbs):
    """The engine in a script's hands. ``reached`` counts how often each window of ``sometimes`` was open."""

    def __init__(self, rig: Rig, *, rid_prefix: str = "scripted") -> None:
        super().__init__(rig, rid_prefix=rid_prefix)
        self.reached: dict[str, int] = {}
        self.notes: list[Note] = []

    def end(self) -> None:
        """The script has ended: from now on everything but ``reached`` and ``notes`` is refused."""
        self._rig = cast(Rig, _EndedRig())

    def sometimes(self, name: str, condition: object) -> bool:
        """Record whether a window was reached; ``must_reach=[name]`` makes a script fail that never did."""
        if not name:
            raise BadCall("sometimes() takes a name that is not empty")
        if condition and not self.reached.get(name):
            self.notes.append(Note(self.scheduler.step_number, name))
        self.reached[name] = self.reached.get(name, 0) + bool(condition)
        return bool(condition)
