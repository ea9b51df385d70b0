"""An engine of a fleet under the search: its run, its messages to the others, and its view of prefill engines.

A decode engine chooses among prefill engines with the state machine of its front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.messages import Generate, PrefillDropped, PrefillWanted, Refusal, Reply, TokenOutput
from engine.core.routing.load import Load
from engine.core.routing.prefills import PREFILL, Prefills
from scripted.core.violation import Violation
from scripted.fleets.machine import MemberRun, SearchedMember
from scripted_lockstep.script.fleet_traffic import ConnectedEngine

_GONE: Final = "is gone"


class PrefillAnswer(msgspec.Struct, frozen=True):
    """A prefill engine's answer to the prompt of a transfer; ``error`` is None if the prompt was sent."""

    transfer: int
    error: str | None
    status: int | None


class PrefillLoad(msgspec.Struct, frozen=True):
    """The load that a prefill engine reports; None while it is draining."""

    load: Load | None


class SearchedEngine(ConnectedEngine, SearchedMember):
    """One engine of a fleet, which sends everything to all others.

    ``others`` are their names. A prefill engine reports its load when it changes, and a decode engine knows it once the
    link delivers it.
    """

    def __init__(self, name: str, run: MemberRun, others: Sequence[str]) -> None:
        super().__init__(name, run)
        self.transfers.is_imagined = False
        self._announced: PrefillLoad | None = None
        self._decoding = [other for other in others if other[0] == "d"]
        self.prefills: Prefills | None = None
        if self.limits.receives:
            capacity = self.limits.rows + self.limits.max_queued_requests
            prefills = [other for other in others if other[0] == "p"]
            self.prefills = Prefills(prefills, self.limits.page_size, capacity, run.clock.now)
            run.machine.choose_prefill = self._choose

    def step(self) -> None:
        if self.run.advance():
            self.tell(self.run.previous.replies)
        if self.limits.prefills and self._load != self._announced:
            self._announced = self._load
            self.said += [(other, self._announced) for other in self._decoding]

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self.transfers.ends_soon

    @property
    def is_quiet(self) -> bool:
        return super().is_quiet and not self.serving and not self.asked

    # -- what a decode engine knows --

    def tell(self, replies: Sequence[Reply]) -> None:
        if self.prefills is None:
            super().tell(replies)
            return
        for reply in replies:
            match reply:
                case PrefillWanted():
                    refused = self.prefills.wanted(reply)
                    if refused is not None:
                        self.arrived.append(refused)
                        continue
                case PrefillDropped():
                    self.prefills.dropped(reply.transfer, is_late=reply.is_late)
                case TokenOutput() | Refusal():
                    self.prefills.heard(reply)
                case _:
                    pass
            super().tell((reply,))

    def answer(self, receiver: str, transfer: int, error: str | None, status: int | None) -> None:
        self.said.append((receiver, PrefillAnswer(transfer, error, status)))

    def receive(self, sender: str, message: object) -> None:
        match message:
            case PrefillAnswer():
                self._take_answer(message)
            case PrefillLoad():
                assert self.prefills is not None
                if message.load is None:
                    self.prefills.lost(sender, "is draining")
                else:
                    self.prefills.met(sender, message.load)
            case _:
                super().receive(sender, message)

    def on_connected(self, other: str) -> None:
        """Assume that another engine is new and idle; a prefill engine also reports its load to all again."""
        self._announced = None
        if self.prefills is not None and other in self.prefills.urls:
            self.prefills.met(other, _load_of(0, 0, 0, self.limits.page_size))

    def on_disconnected(self, other: str) -> None:
        if self.prefills is not None and other in self.prefills.urls:
            self.prefills.lost(other, _GONE)
        super().on_disconnected(other)

    def lose_call(self, transfer: int, why: str) -> None:
        assert self.prefills is not None
        failed = self.prefills.failed(transfer, why)
        if failed is not None:
            self.arrived.append(failed)

    def check_quiet(self) -> None:
        if self.prefills is None:
            return
        left = [f"{url} ({count})" for url in self.prefills.urls if (count := self.prefills.in_flight(url))]
        if self.prefills.open_calls or left:
            raise Violation(
                f"nothing is on its way, but {self.prefills.open_calls} prompts count as asked for, and these prefill "
                f"engines as having requests: {', '.join(left) or 'none'}"
            )

    # -- inside --

    @property
    def _load(self) -> PrefillLoad:
        if self.is_draining:
            return PrefillLoad(None)
        scheduler = self.run.machine.scheduler
        cached = scheduler.memory.pages.cached
        version = scheduler.counters.weights_version
        return PrefillLoad(_load_of(scheduler.books.sleep_level, cached, version, self.limits.page_size))

    def _take_answer(self, message: PrefillAnswer) -> None:
        assert self.prefills is not None
        self.asked.pop(message.transfer, None)
        if message.error is None:
            self.prefills.answered(message.transfer)
            return
        failed = self.prefills.failed(message.transfer, message.error, message.status)
        if failed is not None:
            self.arrived.append(failed)

    def _choose(self, message: Generate) -> str | None:
        assert self.prefills is not None
        return self.prefills.place(message).prefill_at


def _load_of(sleep_level: int, cached_pages: int, weights_version: int, page_size: int) -> Load:
    """Return the load of a prefill engine, without the numbers that the placement counts itself."""
    return Load(
        role=PREFILL,
        sleep_level=sleep_level,
        cached_pages=cached_pages,
        weights_version=weights_version,
        page_size=page_size,
        num_running_reqs=0,
        num_waiting_reqs=0,
        num_pending_tokens=0,
        free_pages=0,
    )
