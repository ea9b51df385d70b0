"""What the account of clients knows at a moment: who is alive, what is in flight, what is due to whom.

Built from events and plans alone. What launches and results do to it is in modules of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.limits import Limits
from engine.messages import ABORT, LENGTH, TIMEOUT, FinishReason, PauseMode, PipelineFailed
from engine.plan import Microbatch, Segment
from scripted.adapters.lockstep.oracle.calls import Calls
from scripted.adapters.lockstep.oracle.due_replies import DueReplies
from scripted.adapters.lockstep.oracle.grammars import GrammarAccount
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.oracle.lora_calls import LoraCalls
from scripted.adapters.lockstep.oracle.pages import Pages, Tenancy
from scripted.adapters.lockstep.oracle.profile_calls import ProfileCalls
from scripted.adapters.lockstep.oracle.stats_calls import StatsCalls
from scripted.adapters.lockstep.oracle.totals import Totals
from scripted.core.violation import Violation

__all__ = ["Flight", "Ledger"]


class Flight:
    """A microbatch in flight, with the life and the tenancy of each of its segments, in their order."""

    __slots__ = ("copies", "id", "lives", "mode", "segments", "tenancies")

    def __init__(self, microbatch: Microbatch, lives: list[Life], tenancies: list[Tenancy]) -> None:
        self.id = microbatch.id
        self.mode = microbatch.mode
        self.segments = microbatch.segments
        self.copies = microbatch.copies
        self.lives = lives
        self.tenancies = tenancies

    @property
    def work(self) -> Iterable[tuple[Segment, Life, Tenancy]]:
        """Each segment with its life and tenancy."""
        return zip(self.segments, self.lives, self.tenancies, strict=True)


class Ledger:
    """``lives`` are all requests by arrival, ``live`` those that have not ended, by rid.

    ``partial`` is the request that is partly computed. ``due`` is what clients must be told in this step.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}
        self.partial: Life | None = None
        self.flights: deque[Flight] = deque()
        self.pages = Pages(limits)
        self.due = DueReplies(limits.max_queued_requests)
        self.calls = Calls()
        self.stats = StatsCalls()
        self.profiles = ProfileCalls()
        self.grammars = GrammarAccount()
        self.loras = LoraCalls(limits)
        self.paused: PauseMode | None = None
        self.dead: PipelineFailed | None = None
        self.totals = Totals()

    @property
    def is_quiescent(self) -> bool:
        """Nothing is in flight and no request owns memory."""
        return not (self.flights or self.pages.rows)

    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
        return sum([life.tenancy is None for life in self.live.values()])

    def is_used(self, lora: str) -> bool:
        """Whether a request of this LoRA is alive or owns memory."""
        rows = self.pages.rows.values()
        alive = any(life.message.lora == lora for life in self.live.values())
        return alive or any(tenancy.lora in self.loras.versions_of(lora) for tenancy in rows)

    def counts(self) -> dict[str, int]:
        """What an answer to a question for the counters has to say now."""
        return self.totals.as_dict() | {
            "waiting": self.waiting,
            "chunked": int(self.partial is not None),
            "running": sum(life.running for life in self.live.values()),
            "in_flight": len(self.flights),
            "alive": len(self.live),
        }

    def end(self, life: Life, reason: FinishReason, *tokens: int, error: str | None = None) -> None:
        """A request ends: its client is told, with these last tokens, and its memory is free once it has landed."""
        if (tokens or reason is LENGTH) and life.due:
            raise Violation(f"{life.rid} ends with {reason}, but its prompt logprobs of {life.due} were never told")
        self.due.expect(life, tokens, reason, error)
        if reason is ABORT:
            self.totals.requests_aborted += 1
        elif reason is TIMEOUT:
            self.totals.requests_timed_out += 1
        else:
            self.totals.requests_finished += 1
        life.end, life.running = reason, False
        del self.live[life.rid]
        if self.partial is life:
            self.partial = None
        if life.tenancy is not None and not life.tenancy.leaving:
            self.pages.leave(life.tenancy)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Every request that is alive ends."""
        for life in list(self.live.values()):
            self.end(life, reason, error=error)

    def retract(self, tenancy: Tenancy) -> None:
        """The engine takes a request's memory without an event that asks for it. It may, while the request decodes."""
        life = self.live.get(tenancy.rid)
        if life is None or life.tenancy is not tenancy or tenancy.in_flight or not life.running:
            raise Violation(f"{tenancy.rid} lost its memory, but it is in flight or was not decoding")
        life.running = False
        self.pages.leave(tenancy)
        self.note_if_retracted(life)

    def retract_all(self) -> None:
        """A pause sends every request that owns memory back to the queue."""
        self.partial = None
        for life in self.live.values():
            life.running = False
            if life.tenancy is not None and not life.tenancy.leaving:
                self.pages.leave(life.tenancy)
                self.note_if_retracted(life)

    def note_if_retracted(self, life: Life) -> None:
        """A request on its way back to the queue is there when the last microbatch with it is back."""
        tenancy = life.tenancy
        if tenancy is not None and tenancy.leaving and not tenancy.in_flight and life.end is None:
            life.tenancy = None
            life.retractions += 1
            self.totals.retractions += 1
