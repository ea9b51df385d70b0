"""The answers to administrative calls: each call is answered once, in the right step, and truthfully.

The account of clients feeds it calls and answers and says whether the engine is quiescent. It knows no request.
"""

from __future__ import annotations

from engine.messages import (
    CallAnswer,
    ClientMessage,
    FlushCache,
    LoadLora,
    StartProfile,
    StopProfile,
    UnloadLora,
    UpdateWeights,
)
from scripted.core.violation import Violation

__all__ = ["Calls"]


class Calls:
    """``update`` is the weight update that is asked for or in flight. ``weights`` are the paths by version."""

    def __init__(self) -> None:
        self.open: dict[str, ClientMessage] = {}
        self.update: UpdateWeights | None = None
        # What is wrong with an answer, unless the engine's own audit of the step says more of it.
        self.suspicion = ""
        self.weights: list[str | None] = [None]
        # Calls of this step that must be answered in it; those of them that found the engine quiescent.
        self._at_once: list[str] = []
        self._quiescent: list[str] = []
        # The one call that waits for the engine to be quiescent, and whether it began to in this step.
        self._waiting: str | None = None
        self._newly_waiting = False
        # The update whose result is back in this step, and what went wrong with it.
        self._landed: UpdateWeights | None = None
        self._error: str | None = None

    def begin_step(self) -> None:
        """Forget what belongs to the last step only."""
        if self._at_once:
            self._at_once.clear()
            self._quiescent.clear()
        self._newly_waiting = False

    def ask(self, call_id: str, message: ClientMessage, *, quiescent: bool) -> bool:
        """Note a call. True for a flush that must be done now."""
        self.open[call_id] = message
        if isinstance(message, StartProfile | StopProfile | LoadLora | UnloadLora):
            return False
        if not isinstance(message, FlushCache | UpdateWeights):
            self._at_once.append(call_id)
            return False
        quiescent = quiescent and self.update is None
        if isinstance(message, UpdateWeights) and quiescent:
            self.update = message
            return False
        if not quiescent and message.timeout_s is not None and self._waiting is None:
            self._waiting, self._newly_waiting = call_id, message.timeout_s > 0
            return False
        self._at_once.append(call_id)
        if quiescent:
            self._quiescent.append(call_id)
        return quiescent

    def begin_waiting_update(self, *, quiescent: bool) -> None:
        """The events of a step are applied. An update that waits for a quiescent engine may begin now."""
        waiting = self.open.get(self._waiting) if self._waiting is not None else None
        if isinstance(waiting, UpdateWeights) and quiescent and self.update is None:
            self.update, self._waiting = waiting, None

    def land_update(self, error: str | None) -> bool:
        """The stages' result for the update is back; True when they have the new weights."""
        if self.update is not None and error is None:
            self.weights.append(self.update.model_path)
        self._landed, self._error, self.update = self.update, error, None
        return error is None

    def answered(self, answer: CallAnswer, *, quiescent: bool, dead: bool) -> bool:
        """Check an answer; True for a flush that was done. Raises Violation."""
        call_id, message = answer.call_id, self.open.pop(answer.call_id, None)
        if message is None:
            raise Violation(f"{call_id} is answered, but no call is open: {answer.message}")
        if isinstance(message, UpdateWeights):
            self._check_update(message, answer, quiescent=quiescent, dead=dead)
            return False
        if isinstance(message, FlushCache):
            self._check_flush(message, answer, quiescent=quiescent and self.update is None)
            return answer.ok
        if not (answer.ok or isinstance(message, StartProfile | StopProfile | LoadLora | UnloadLora)):
            raise Violation(f"{_name(message)} can always be done, but is answered with {answer.message!r}")
        return False

    def end_step(self) -> None:
        """Every call that cannot wait has been answered in its step. Raises Violation."""
        for call_id in self._at_once:
            if call_id in self.open:
                raise Violation(f"{_name(self.open[call_id])} is not answered in its step: {call_id}")
        if self._landed is not None:
            raise Violation(f"the update to {self._landed.model_path} is back, but its caller is not told")

    def check_end(self) -> None:
        """Nothing can happen any more. Every call must have been answered. Raises Violation."""
        if self.open:
            raise Violation(f"{', '.join(map(_name, self.open.values()))} never got an answer")

    def _check_flush(self, flush: FlushCache, answer: CallAnswer, *, quiescent: bool) -> None:
        asked_quiescent, waited = flush.call_id in self._quiescent, flush.call_id == self._waiting
        could = asked_quiescent or (waited and quiescent)
        if answer.ok and not could:
            self.suspicion = f"the cache was flushed while something is in flight or owns memory: {answer.message}"
        if could and not answer.ok:
            raise Violation(f"a flush is refused although nothing is in flight or owns memory: {answer.message}")
        if waited:
            self._end_waiting(answer)

    def _check_update(self, update: UpdateWeights, answer: CallAnswer, *, quiescent: bool, dead: bool) -> None:
        if update is self._landed:
            self._landed = None
            if answer.ok is not (self._error is None):
                said = "succeeded" if answer.ok else "failed"
                raise Violation(
                    f"the update to {update.model_path} is said to have {said}, but its error is {self._error}"
                )
        elif answer.ok:
            raise Violation(f"the update to {update.model_path} is said to have succeeded, but its result is not back")
        elif update is self.update:
            self.update = None
            if not dead:
                raise Violation(f"the update to {update.model_path} is refused before its result: {answer.message}")
        elif update.call_id == self._waiting:
            if quiescent and not dead:
                raise Violation(f"an update is refused although nothing is in flight or owns memory: {answer.message}")
            self._end_waiting(answer)

    def _end_waiting(self, answer: CallAnswer) -> None:
        if self._newly_waiting and not answer.ok:
            raise Violation(f"{answer.call_id} may wait, and is refused at once: {answer.message}")
        self._waiting = None


def _name(message: ClientMessage) -> str:
    return type(message).__name__
