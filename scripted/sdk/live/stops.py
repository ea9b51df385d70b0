"""The stops of an engine's loop: where it waits for messages or a result, or would plan twice in one step.

A gate stands between the loop and a script, two threads of which one runs at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from typing_extensions import TypeVar

from scripted.core.errors import NoAnswer

ANSWER_TIMEOUT_S: Final = 30.0


class LoopGate:
    """``where`` names what the loop waits for, and is empty while it runs. Events from outside notify ``news``.

    An open gate stops no thread: the engine is starting, or its process is ending.
    """

    def __init__(self, answer_timeout_s: float) -> None:
        self.news = threading.Condition()
        self.where = ""
        self.is_open = True
        self._answer_timeout_s = answer_timeout_s

    # -- in the loop's thread --

    def stop_at(self, where: str) -> None:
        """Wait here until the script lets the loop go on."""
        with self.news:
            if self.is_open:
                return
            self.where = where
            self.news.notify_all()
            self.news.wait_for(lambda: not self.where or self.is_open)

    # -- in the script's thread --

    def go_on(self) -> None:
        """Let the loop run until it waits again. Raises NoAnswer."""
        with self.news:
            self.where = ""
            self.news.notify_all()
        self.wait(lambda: bool(self.where), "the engine's loop to come back to the gate")

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait for something from outside. Raises NoAnswer when it takes too long."""
        with self.news:
            if not self.news.wait_for(done, self._answer_timeout_s):
                raise NoAnswer(f"waited {self._answer_timeout_s:g} s in vain for {what}")

    # -- in any thread --

    def notify(self) -> None:
        with self.news:
            self.news.notify_all()

    def open(self) -> None:
        with self.news:
            self.is_open = True
            self.news.notify_all()


_MessageT = TypeVar("_MessageT", default=Any)


class HeldQueue(queue.Queue[_MessageT]):
    """The queue of a loop's messages, ``held`` until they are let in.

    ``ends`` says whether a message ends the process; such a message opens the gate.
    """

    def __init__(self, gate: LoopGate, ends: Callable[[_MessageT], bool]) -> None:
        super().__init__()
        self.held: list[_MessageT] = []
        self._gate = gate
        self._ends = ends

    def put(self, item: _MessageT, block: bool = True, timeout: float | None = None) -> None:
        if self._gate.is_open or self._ends(item):
            super().put(item, block, timeout)
            self._gate.open()
            return
        with self._gate.news:
            self.held.append(item)
            self._gate.news.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> _MessageT:
        """Return the oldest message that was let in; while there is none, the loop stops here."""
        while block and self.empty() and not self._gate.is_open:
            self._gate.stop_at("messages")
        return super().get(block, timeout)

    def wake(self, item: _MessageT) -> None:
        """Let in a message that only wakes the loop."""
        super().put(item)

    def let_in(self) -> list[_MessageT]:
        """Let in all held messages and return them."""
        with self._gate.news:
            items, self.held = self.held, []
        for item in items:
            super().put(item)
        return items


class LoopStops:
    """The stops that an adapter's hook puts into its engine's loop, with the last step's observations.

    ``batches`` counts the launches so far, of which ``launched`` were made in this step; the results of the first
    ``released`` are let through. Messages wait in the ``inbox``; ``ends`` says which one ends the process.
    """

    def __init__(self, ends: Callable[[Any], bool]) -> None:
        self.gate = LoopGate(ANSWER_TIMEOUT_S)
        self.inbox = HeldQueue(self.gate, ends)
        self.batches = 0
        self.released = 0
        self._waited_for = 0

    def close(self) -> None:
        """Stop the loop from now on: the front end is serving."""
        self.gate.is_open = False
        self.wake()
        self.gate.wait(lambda: bool(self.gate.where), "the engine's loop at the gate")

    def wake(self) -> None:
        """Wake a loop that sleeps until the next message, and bring it to the gate."""

    def begin_step(self) -> None:
        """Forget the observations of the last step."""

    @property
    def waits_for_result(self) -> bool:
        """Whether the loop waits for a result that has not been let through."""
        return self.gate.where == "result" and self.released < self._waited_for

    def await_release(self, batch_id: int) -> None:
        """Wait in the loop's thread until this batch's result is let through."""
        self._waited_for = batch_id
        while not (self.is_released(batch_id) or self.gate.is_open):
            self.gate.stop_at("result")

    def is_released(self, batch_id: int) -> bool:
        """Whether the loop may take this result now."""
        return batch_id <= self.released
