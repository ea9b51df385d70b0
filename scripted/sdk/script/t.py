"""``t`` of a script for a adapter of the SDK: verbs, waits and queries, windows, and what the script leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

from scripted.errors import BadCall
from scripted.script.windows import holds_in
from scripted.sdk.records import Record
from scripted.sdk.script.gate import ScriptGate
from scripted.sdk.script.verbs import Verbs

__all__ = ["AdapterContext"]


class _EndedGate:
    """Stands for the gate of a script that has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BadCall("this t belongs to a script that has ended; use the t that the running script was given")


class AdapterContext(Verbs):
    """A scheduler in a script's hands. ``reached`` counts how often each window of ``sometimes`` was open.

    ``must_reach`` are the windows that the script has to see; if there are any, it can name no others.
    """

    def __init__(self, gate: ScriptGate, *, must_reach: Sequence[str] = ()) -> None:
        super().__init__(gate)
        self._must_reach = must_reach
        self.reached: dict[str, int] = {}
        self._bad_calls_before = BadCall.made
        self._seal()

    def sometimes(self, name: str, condition: object) -> bool:
        """Record whether a window was reached; ``must_reach=[name]`` makes a script fail that never did."""
        holds = holds_in(name, condition, self._must_reach)
        self.reached[name] = self.reached.get(name, 0) + holds
        return holds

    def note_step(self) -> None:
        """A step was run and judged."""
        stepped = self._gate.records[-1].stepped
        assert stepped is not None, "a step that the machine died in is the last one of a run"
        for handle in self._handles:
            if not handle.is_finished:
                handle.note_step(is_preempted=handle.rid in stepped.preempted)

    def loose_ends(self) -> dict[str, int]:
        """What the script leaves now that may be a mistake, counted by name; only what is there."""
        history = self._gate.records
        counts = {
            "requests alive at the end": sum(not handle.is_finished for handle in self._handles),
            "calls without an answer at the end": sum(not call.done for call in self._calls),
            "answers never looked at": sum(
                call.done and call.must_be_read and not call.was_read for call in self._calls
            ),
            "windows not in must_reach": 0 if self._must_reach else len(self.reached),
            "questions about rids that never were": self._asked_in_vain,
            "aborts of rids that never were": self._aborted_in_vain,
            "failures that no batch met": self._failures_not_met(),
            "bad calls that the script caught": BadCall.made - self._bad_calls_before,
            "scripts in which no step had anything to do": not any(map(_did_something, history)),
        }
        return {name: int(count) for name, count in counts.items() if count}

    def end(self) -> None:
        """The script has ended: from now on everything but ``reached`` is refused."""
        self._gate = cast(ScriptGate, _EndedGate())

    def _failures_not_met(self) -> int:
        return sum(all(step <= ordered for step in self._gate.plans) for ordered in self._failures_ordered)


def _did_something(record: Record) -> bool:
    stepped = record.stepped
    return bool(record.step.events) or (stepped is not None and bool(stepped.replies or stepped.microbatch))
