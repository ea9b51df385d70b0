"""What a script can ask of a adapter of the SDK: the queries of ``t``. They change nothing and return copies."""

from __future__ import annotations

from typing import Any, Final

from scripted.core.action import Action
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.phrases import nearest
from scripted.errors import BadCall
from scripted.rig.values import Listed
from scripted.script.asked import Asked
from scripted.script.clock import ScriptClock
from scripted.sdk.actions import (
    AbortRequest,
    FailBatch,
    Flush,
    PauseAll,
    ResumeAll,
    StartRequest,
    actions_of,
)
from scripted.sdk.capabilities import Capabilities
from scripted.sdk.records import Record
from scripted.sdk.script.gate import ScriptGate
from scripted.sdk.script.handles import Call, RequestHandle, status_of
from scripted.sdk.script.state import BatchInFlight, State, batch_in_flight, take_state

__all__ = ["Queries"]

_VERBS: Final[dict[type[Action], str]] = {
    StartRequest: "start_req",
    AbortRequest: "abort",
    Flush: "flush_cache",
    PauseAll: "pause_generation",
    ResumeAll: "continue_generation",
    HoldResults: "hold_results",
    ReleaseResults: "release_results",
    FailBatch: "fail_next_batch",
    AdvanceClock: "clock.advance",
}


class Queries(Asked):
    """The queries of ``t``."""

    def __init__(self, gate: ScriptGate) -> None:
        self._gate = gate
        self._clock = ScriptClock(gate.clock)
        self._can: Capabilities = gate.adapter.limits_of(gate.config)[1]
        known = actions_of(self._can)
        self._declared = [verb for action, verb in _VERBS.items() if action in known]
        self._handles: list[RequestHandle] = []
        self._calls: list[Call] = []
        # What was asked about a rid that never was, and had an answer all the same.
        self._asked_in_vain = 0

    @property
    def clock(self) -> ScriptClock:
        """Virtual time; ``clock.advance(seconds)`` is the only thing that moves it."""
        return self._clock

    @property
    def state(self) -> State:
        """A frozen snapshot of the machine as it is now."""
        return take_state(self._gate, frozenset(mode.name for mode in self._can.pause_modes))

    @property
    def machine(self) -> Any:
        """The live machine of the adapter: there is no wall between a script and the scheduler."""
        return self._gate.machine

    @property
    def history(self) -> tuple[Record, ...]:
        """Every step of this script so far: its events, its plan, its replies, the counts after it."""
        return Listed(self._gate.records)

    @property
    def last_batch(self) -> BatchInFlight | None:
        """What the last step launched; None when it launched nothing."""
        batch = self._gate.plans.get(self._gate.step)
        return None if batch is None else batch_in_flight(self._gate, batch)

    def find_req_by_rid(self, rid: str) -> RequestHandle | None:
        """The handle of the last life of a rid; None for one that never was."""
        if not isinstance(rid, str):
            raise BadCall(f"t.find_req_by_rid() takes a rid, got {rid!r}")
        handle = next((handle for handle in reversed(self._handles) if handle.rid == rid), None)
        self._asked_in_vain += handle is None
        return handle

    def status(self, rid: str) -> str:
        """The status of the last life of a rid; ``unknown`` for one that never was."""
        handle = self.find_req_by_rid(rid)
        return status_of("unknown") if handle is None else handle.status

    def is_finished(self, rid: str) -> bool:
        """True when the last life of this rid has ended. Raises BadCall for a rid that never was."""
        handle = self.find_req_by_rid(rid)
        if handle is None:
            known = sorted({handle.rid for handle in self._handles})
            raise BadCall(
                f"t.is_finished({rid!r}) asks about a rid that never was{nearest(rid, known)}; "
                f"the script has started {', '.join(known) or 'none'}, and t.status(rid) says 'unknown'"
            )
        return handle.is_finished
