"""Where an engine's loop stops: it waits for messages or for a result, or would plan twice in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from scripted.sdk.live.gate import HeldQueue, LoopGate

ANSWER_TIMEOUT_S: Final = 30.0


class LoopStops:
    """What an adapter's hook puts into the loop of its engine, and what was seen there in the last step.

    ``batches`` were launched so far, of which ``launched`` in this step; the results of the first ``released`` are let
    through. Messages wait in the ``inbox``; ``ends`` says which one ends the process.
    """

    def __init__(self, ends: Callable[[Any], bool]) -> None:
        self.gate = LoopGate(ANSWER_TIMEOUT_S)
        self.inbox = HeldQueue(self.gate, ends)
        self.batches = 0
        self.released = 0
        self._waited_for = 0

    def close(self) -> None:
        """The front end serves: from now on the loop stops."""
        self.gate.is_open = False
        self.wake()
        self.gate.wait(lambda: bool(self.gate.where), "the engine's loop at the gate")

    def wake(self) -> None:
        """Bring a loop that sleeps until there is a message to the gate."""

    def begin_step(self) -> None:
        """Forget what was seen in the step before."""

    @property
    def waits_for_result(self) -> bool:
        """The loop waits for a result that is not let through."""
        return self.gate.where == "result" and self.released < self._waited_for

    def await_release(self, batch_id: int) -> None:
        """In the loop's thread: until the result of this batch is let through."""
        self._waited_for = batch_id
        while not (self.is_released(batch_id) or self.gate.is_open):
            self.gate.stop_at("result")

    def is_released(self, batch_id: int) -> bool:
        """Whether the loop may look at this result now."""
        return batch_id <= self.released
