"""Sleep and wake: the stages give weights and KV back, and take them again. Calls are carried out in their order.

From the step that accepts a sleep until all stages are awake again nothing is launched for requests. It knows none.
"""

from __future__ import annotations

from engine.core.memory import KVMemory
from engine.core.messages import CallAnswer, Sleep, Wake
from engine.core.scheduler.books import Books
from engine.core.scheduler.replies import done, refused


class Sleeping:
    """``books.sleep_level`` is 0 while the stages are awake, 2 when they sleep and nobody has said with which weights
    they wake, else 1.
    """

    def __init__(self, books: Books, memory: KVMemory) -> None:
        self._books = books
        self._memory = memory

    def ask(self, call: Sleep | Wake) -> CallAnswer | None:
        """Take a call; None when its answer comes later."""
        books = self._books
        if isinstance(call, Wake):
            if not books.turns and not books.sleep_level:
                return done(call, "awake")
            if max(books.sleep_level, *[_level_of(turn) for turn in books.turns], 0) > 1:
                why = (
                    "its weights were dropped (level=2); POST /update_weights_from_disk first, with those to wake with"
                )
                return refused(call, why)
        books.turns.append(call)
        books.is_awake = False
        return None

    def launch(self) -> int:
        """The level of the first call, as the stages are told it; 0 is awake."""
        return _level_of(self._books.turns[0])

    def finish(self, error: str | None) -> CallAnswer:
        """All stages have done what the first call says, or with ``error`` they are as they were."""
        books = self._books
        call = books.turns.pop(0)
        pages = self._memory.pages.cached
        if error is None:
            books.sleep_level = max(books.sleep_level, call.level) if isinstance(call, Sleep) else 0
            self._memory.reset()
        books.is_awake = not (books.turns or books.sleep_level)
        if error is not None:
            return refused(call, error)
        state = f"asleep (level={books.sleep_level}), dropped {pages} cached pages" if books.sleep_level else "awake"
        return done(call, state)

    def note_update(self) -> None:
        """The stages know the weights of an update, and wake with them."""
        self._books.sleep_level = min(self._books.sleep_level, 1)

    def give_up(self, why: str) -> list[CallAnswer]:
        """Give up every call: nothing can be launched any more."""
        calls, self._books.turns = self._books.turns, []
        return [refused(call, why) for call in calls]


def _level_of(call: Sleep | Wake) -> int:
    return call.level if isinstance(call, Sleep) else 0
