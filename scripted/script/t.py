"""``t``: what a script is given, one object for each script. Queries, waits and verbs have a file each.

It lives in the scheduler's process, inside the gate, and sees the live scheduler. It keeps no state of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

from engine.messages import Completion
from engine.scheduler import StepRecord
from scripted.errors import BadCall, BudgetSpent
from scripted.report.step_log import Note
from scripted.rig.rig import Rig
from scripted.script.verbs import Verbs
from scripted.script.windows import holds_in

__all__ = ["ScriptContext"]


class _EndedRig:
    """Stands for the rig of a script that has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BadCall("this t belongs to a script that has ended; use the t that the running script was given")


class ScriptContext(Verbs):
    """What a script drives the engine with. ``reached`` counts how often each window of ``sometimes`` was open.

    ``must_reach`` are the windows that the script has to see; if there are any, it can name no others.
    """

    def __init__(self, rig: Rig, *, rid_prefix: str = "scripted", must_reach: Sequence[str] = ()) -> None:
        super().__init__(rig, rid_prefix=rid_prefix)
        self._must_reach = must_reach
        self.reached: dict[str, int] = {}
        self.notes: list[Note] = []
        self._bad_calls_before = BadCall.made
        self._budgets_before = BudgetSpent.made
        self._seal()

    def loose_ends(self) -> dict[str, int]:
        """What the script leaves behind that may be a mistake: counts by name, without the zeros."""
        calls = self._rig.handles.calls
        history, dead = self._rig.history.records, self._rig.is_dead
        counts = {
            "requests alive at the end": sum(not handle.finished for handle in self._rig.handles.all if not dead),
            "calls without an answer at the end": sum(not call.done for call in calls),
            "answers never looked at": sum(call.done and call.must_be_read and not call.was_read for call in calls),
            "windows not in must_reach": 0 if self._must_reach else len(self.reached),
            "questions about rids that never were": self._asked_in_vain,
            "aborts of rids that never were": self._aborted_in_vain,
            "failures of a stage that no step met": self._failures_not_met(),
            "failures of a grammar that none met": max(0, self._grammar_failures - self._rig.grammars.failed),
            "bad calls that the script caught": BadCall.made - self._bad_calls_before,
            "spent budgets that the script caught": BudgetSpent.made - self._budgets_before,
            "scripts without a step": not history,
            "scripts in which no step had anything to do": bool(history) and not any(map(_did_something, history)),
        }
        return {name: int(count) for name, count in counts.items() if count}

    def _failures_not_met(self) -> int:
        """Calls of ``fail_next_step`` after which nothing was launched and nothing came back failed."""
        fails = [record.step for record in self._rig.history.records if _can_fail(record)]
        return sum(not any(step > ordered for step in fails) for ordered in self._failures_ordered)

    def end(self) -> None:
        """The script has ended: from now on everything but ``reached`` and ``notes`` is refused."""
        self._rig = cast(Rig, _EndedRig())

    def sometimes(self, name: str, condition: object) -> bool:
        """Record whether a window was reached. With ``must_reach=[name]`` a script that never reached it fails."""
        holds = holds_in(name, condition, self._must_reach)
        if holds and not self.reached.get(name):
            self.notes.append(Note(self.scheduler.step_number, name))
        self.reached[name] = self.reached.get(name, 0) + holds
        return holds


def _can_fail(record: StepRecord) -> bool:
    """The step gave the stages something to compute, or learned that they failed to."""
    failed = any(isinstance(event, Completion) and event.error is not None for event in record.events)
    return failed or record.microbatch is not None


def _did_something(record: StepRecord) -> bool:
    return bool(record.events or record.replies or record.microbatch is not None)
