"""Administrative calls that need more than the next step: flush, weight update, profile, LoRAs, sleep, wake.

Asks who owns each of them, launches what the stages are to be told as a microbatch of its own, and turns its result
into the call's answer. It knows no request.
"""

from __future__ import annotations

from engine.core.limits import Limits
from engine.core.messages import (
    CallAnswer,
    LoadLora,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
    Wake,
)
from engine.core.plan import LoraUpdate, Microbatch, ProfileSwitch, SleepSwitch, WeightUpdate
from engine.core.scheduler.books import Books
from engine.core.scheduler.flush_and_update import FlushAndUpdate
from engine.core.scheduler.loras import Loras
from engine.core.scheduler.profiles import Profiles
from engine.core.scheduler.replies import ControlCall
from engine.core.scheduler.sleeping import Sleeping


class Controls:
    """The calls that are not answered in the step that sees them.

    ``deadline`` is when the first of those that wait gives up, in seconds; None when none waits.
    """

    def __init__(
        self, limits: Limits, books: Books, flush_and_update: FlushAndUpdate, loras: Loras, sleeping: Sleeping
    ) -> None:
        self._depth = limits.depth
        self._has_loras = limits.max_loras > 0
        self._books = books
        self._flush_and_update = flush_and_update
        self.loras = loras
        self._sleeping = sleeping
        self._profiles = Profiles()
        # An attribute, because every step asks.
        self.deadline: float | None = None

    @property
    def is_at_rest(self) -> bool:
        """No call waits, no profile is being taken, no LoRA is loaded or dropped, and the stages are awake."""
        profiles = self._profiles
        is_open = self.deadline is not None or profiles.is_open or profiles.folder is not None
        return self._books.is_awake and not is_open and self.loras.is_at_rest

    @property
    def is_due(self) -> bool:
        """True while another change of LoRAs is due and has a place in the pipeline: a profile goes before it."""
        books = self._books
        has_slot = books.is_awake and books.update is None and len(books.in_flight) < self._depth
        return self.loras.is_call_due and has_slot

    def ask(self, call: ControlCall, now: float) -> CallAnswer | None:
        """Do or refuse a call; None when its answer comes later."""
        if isinstance(call, StartProfile | StopProfile):
            return self._profiles.ask(call)
        if isinstance(call, Sleep | Wake):
            return self._sleeping.ask(call)
        if isinstance(call, LoadLora | UnloadLora):
            answer = self.loras.ask(call, now)
        else:
            answer = self._flush_and_update.ask(call, now)
        self._note_deadline()
        return answer

    def answers_due(self, now: float) -> list[CallAnswer]:
        """The answers to the calls that wait, if their time has come."""
        answers = self._flush_and_update.answer_due(now), self.loras.answer_due(now)
        self._note_deadline()
        return [answer for answer in answers if answer is not None]

    def microbatch(self, number: int) -> Microbatch | None:
        """The next message to the stages, if it is due: an update or a sleep alone, all others in a slot."""
        books, profile = self._books, self._profiles.due
        update, turns = books.update, books.turns
        if not self._has_loras and update is None and profile is None and not turns:
            return None
        change, in_flight = None, len(books.in_flight)
        if self._has_loras:
            has_slot = books.is_awake and update is None and profile is None and in_flight < self._depth
            change = self.loras.next_change(has_slot=has_slot)
        if update is not None:
            return None if in_flight else WeightUpdate(number, update.model_path)
        if turns and books.open_transfers:
            return None
        if turns:
            return None if in_flight else SleepSwitch(number, self._sleeping.launch())
        if profile is not None and in_flight < self._depth:
            return ProfileSwitch(number, self._profiles.launch())
        return None if change is None else LoraUpdate(number, change)

    def finish(self, microbatch: Microbatch, error: str | None) -> CallAnswer | None:
        """Note that all stages have carried out the last message, or with ``error`` that they could not.

        None where no call asked for it.
        """
        if isinstance(microbatch, WeightUpdate):
            if error is None:
                self._sleeping.note_update()
            return self._flush_and_update.finish_update(error)
        if isinstance(microbatch, SleepSwitch):
            return self._sleeping.finish(error)
        if isinstance(microbatch, LoraUpdate):
            return self.loras.finish(error)
        return self._profiles.finish(error)

    def give_up(self, why: str) -> list[CallAnswer]:
        """Give up every call: nothing can be launched any more, and nothing will come back."""
        update = self._books.update
        answers = [] if update is None else [self._flush_and_update.finish_update(why, is_dead=True)]
        answers += [self._profiles.finish(why)] if self._profiles.is_open else []
        answers += self._sleeping.give_up(why)
        answers += self.loras.give_up(why)
        self._note_deadline()
        return answers

    def _note_deadline(self) -> None:
        one, other = self._flush_and_update.deadline, self.loras.deadline
        self.deadline = one if other is None else other if one is None else min(one, other)
