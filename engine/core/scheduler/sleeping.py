"""Sleep and wake: the stages free weights and KV, and allocate them again. Calls are carried out in order.

From the step that accepts a sleep until all stages are awake again, nothing is launched for requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.errors import IntegrityError
from engine.core.messages import CallAnswer, Sleep, Wake
from engine.core.plan import SleepSwitch
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.replies import done, refused
from engine.core.scheduler.request import Request


class Sleeping(Feature):
    """``books.sleep_level`` is 0 while the stages are awake, 1 while they sleep, and 2 while they sleep without weights
    to wake with.
    """

    control = SleepSwitch
    # Set while a call is open; nothing else is launched meanwhile.
    is_due = False

    def __init__(self, core: Core) -> None:
        self._core = core
        self._books = core.books
        self._memory = core.memory

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {Sleep: self._on_sleep, Wake: self._on_call}

    def _on_sleep(self, call: Sleep) -> None:
        self._core.stop_requests(call.mode)
        self._on_call(call)

    def _on_call(self, call: Sleep | Wake) -> None:
        self._core.answer_now(self.ask(call))

    def ask(self, call: Sleep | Wake) -> CallAnswer | None:
        """Take a call; None if its answer comes later."""
        books = self._books
        if isinstance(call, Wake):
            if not books.turns and not books.sleep_level:
                return done(call, "awake")
            if max(books.sleep_level, *[_level_of(turn) for turn in books.turns], 0) > 1:
                why = (
                    "its weights were dropped (level=2); POST /update_weights_from_disk first, with the weights to "
                    "wake with"
                )
                return refused(call, why)
        books.turns.append(call)
        self.is_due = True
        books.is_awake = False
        return None

    def launch(self, number: int) -> SleepSwitch | None:
        """Carry out the first call, once nothing is in flight and no transfer is open."""
        books = self._books
        if books.open_transfers or books.in_flight:
            return None
        return SleepSwitch(number, _level_of(books.turns[0]))

    def finish(self, error: str | None) -> None:
        """Answer the first call: all stages have carried it out, or with ``error`` none has."""
        books = self._books
        call = books.turns.pop(0)
        self.is_due = bool(books.turns)
        pages = self._memory.pages.cached
        if error is None:
            books.sleep_level = max(books.sleep_level, call.level) if isinstance(call, Sleep) else 0
            self._memory.reset()
        books.is_awake = not (books.turns or books.sleep_level)
        if error is not None:
            self._core.say(refused(call, error))
            return
        state = f"asleep (level={books.sleep_level}), dropped {pages} cached pages" if books.sleep_level else "awake"
        self._core.say(done(call, state))

    def change_weights(self) -> None:
        """Note the weights of an update, with which the stages will wake."""
        self._books.sleep_level = min(self._books.sleep_level, 1)

    def give_up(self, why: str) -> None:
        calls, self._books.turns = self._books.turns, []
        self.is_due = False
        self._books.is_awake = not self._books.sleep_level
        for call in calls:
            self._core.say(refused(call, why))

    def stats(self) -> dict[str, int]:
        return {"sleep_level": self._books.sleep_level}

    def check(self, live: Sequence[Request]) -> None:
        """Check that requests may be computed exactly while no call waits and the stages are awake."""
        del live
        books = self._books
        if self.is_due is not bool(books.turns) or books.is_awake is bool(books.turns or books.sleep_level):
            raise IntegrityError(
                f"the stages sleep at level {books.sleep_level} and the calls {books.turns} wait, but "
                f"is_awake={books.is_awake} and is_due={self.is_due}"
            )

    @property
    def is_at_rest(self) -> bool:
        return self._books.is_awake


def _level_of(call: Sleep | Wake) -> int:
    return call.level if isinstance(call, Sleep) else 0
