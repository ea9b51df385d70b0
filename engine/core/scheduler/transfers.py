"""KV between engines: what a decode engine receives of prompts that another one computes, and what that one sends.

Owns the transfers that the stages have not ended, their orders, and how long a decode engine waits. A page of a
transfer belongs to its request until the stages say that they neither read nor write it any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory import KVMemory
from engine.core.messages import PagesReceived, PagesSent, PrefillDropped, PrefillWanted
from engine.core.plan import ReceivePages, SendPages, StopTransfer, TransferOrder
from engine.core.scheduler.books import Books
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.request import (
    DELIVERING,
    DISPATCHED,
    NO_LOGPROBS_DUE,
    RECEIVING,
    Request,
)


@dataclass(slots=True)
class _Open:
    """A transfer that the stages have not ended. ``deadline`` is None for one that is sent, or that was stopped."""

    request: Request
    first_page: int
    pages: int
    deadline: float | None = None
    is_stopped: bool = False


class Transfers:
    """The transfers of one engine, by numbers that count from 1 and are never used again; ``begun`` is the last one.

    ``deadline``, in seconds, is when the first of those that are received is stopped; None when none is waited for.
    """

    def __init__(self, limits: Limits, books: Books, memory: KVMemory, counters: Counters) -> None:
        self._page_size = limits.page_size
        self._timeout_s = limits.prefill_timeout_s
        self._books = books
        self._memory = memory
        self._counters = counters
        self.begun = 0
        self._open: dict[int, _Open] = {}
        self._orders: list[TransferOrder] = []
        self._told: list[PrefillWanted | PrefillDropped] = []
        # An attribute, because every step asks.
        self.deadline: float | None = None

    # -- looking --

    @property
    def has_news(self) -> bool:
        """Something was ordered or is to be told since it was last taken."""
        return bool(self._orders or self._told)

    def requests(self) -> Iterable[Request]:
        """The request of each transfer that the stages have not ended."""
        return [one.request for one in self._open.values()]

    def next_received(self) -> Request | None:
        """The first request whose pages have come, or will come no more; None while a prompt is partly prefilled."""
        if self._books.chunked is not None:
            return None
        return next(
            (one for one in self._books.transferring.values() if one.place is RECEIVING and not one.in_flight), None
        )

    # -- a decode engine --

    def may_receive(self, request: Request) -> bool:
        """Whether another engine may compute its prompt.

        Not without a prefill engine, with a LoRA, which other engines know by other numbers, or with prompt logprobs,
        which are computed with the prompt.
        """
        return request.prefill_at is not None and request.lora is None and request.logprobs_due == NO_LOGPROBS_DUE

    def begin(self, request: Request, now: float) -> bool:
        """Receive what an admitted request does not find cached, in full pages; False where it computes all itself.

        Its last token is always computed here.
        """
        lease, size = request.lease, self._page_size
        assert lease is not None, f"{request} receives, but owns no memory"
        first, end = len(lease.pages), (len(request.ids) - 1) // size
        if not self.may_receive(request) or end <= first:
            return False
        assert request.prefill_at is not None
        if not self._memory.extend(lease, end * size):
            raise IntegrityError(f"{request} was admitted, but has no room for {end - first} pages of its prompt")
        request.place = RECEIVING
        request.prefill_start = request.planned_tokens = end * size
        self._books.transferring[request.rid] = request
        number = self._begin(_Open(request, first, end - first, now + self._timeout_s))
        self._orders.append(ReceivePages(number, tuple(lease.pages[first:])))
        wanted = PrefillWanted(
            rid=request.rid,
            transfer=number,
            at=request.prefill_at,
            ids=tuple(request.ids[: end * size]),
            first_page=first,
            weights=self._books.weights,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self._told.append(wanted)
        self._note_deadline()
        return True

    def received(self, event: PagesReceived) -> Request | None:
        """The stages have ended a transfer: its request, which computes what has not come; None if it was given up."""
        one = self._end(event.transfer)
        if one is None:
            return None
        if event.pages > one.pages:
            raise IntegrityError(f"{event.pages} pages came for {one.request}, {one.pages} were asked for")
        self._counters.pages_received += event.pages
        request = one.request
        if event.pages < one.pages:
            request.prefill_at = None
        if request.place is RECEIVING:
            request.prefill_start = request.planned_tokens = (one.first_page + event.pages) * self._page_size
            assert request.lease is not None, f"{request} received, but owns no memory"
            self._memory.trim(request.lease, request.planned_tokens)
        return request

    def fail(self, number: int, *, is_late: bool = False) -> None:
        """The prefill engine sends no more, or ``is_late``: go on with what has come."""
        one = self._open.get(number)
        if one is not None and one.request.deliver is None:
            one.request.prefill_at = None
            self._stop(number, one, is_late=is_late)

    def fail_overdue(self, now: float) -> None:
        """Go on without those that have taken too long."""
        for number, one in list(self._open.items()):
            if one.deadline is not None and one.deadline <= now:
                self.fail(number, is_late=True)

    # -- a prefill engine --

    def send(self, request: Request, confirmed_tokens: int) -> None:
        """Send what is confirmed of a prompt in full pages, and was not sent before.

        With the result of the prompt's last part it is ``DELIVERING`` what is not sent yet.
        """
        deliver, lease = request.deliver, request.lease
        if deliver is None or request.is_finished:
            return
        assert lease is not None, f"{request} is sent, but owns no memory"
        first, end = request.sent_pages, confirmed_tokens // self._page_size
        if end > first:
            number = self._begin(_Open(request, first, end - first))
            place = first - deliver.first_page
            self._orders.append(SendPages(number, tuple(lease.pages[first:end]), deliver.to, deliver.transfer, place))
            request.sent_pages = end
        if request.in_flight and request.place is DISPATCHED and confirmed_tokens == request.prefill_tokens:
            request.place = DELIVERING
            self._books.transferring[request.rid] = request

    def sent(self, event: PagesSent) -> Request | None:
        """The stages have ended a transfer: its request; None if it was given up."""
        one = self._end(event.transfer)
        if one is None:
            return None
        self._counters.pages_sent += 0 if event.error is not None else one.pages
        return one.request

    # -- both --

    def stop(self, request: Request) -> None:
        """A request has ended or is sent back: have the stages end its transfers."""
        for number, one in self._open.items():
            if one.request is request:
                self._stop(number, one)

    def give_up(self) -> None:
        """The stages are gone: they use no page any more."""
        for one in self._open.values():
            one.request.in_flight = 0
        self._open.clear()
        self._books.open_transfers = 0
        self._orders.clear()
        self.deadline = None

    def take_orders(self) -> tuple[TransferOrder, ...]:
        """What the stages are to do since the last call, in order."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_told(self) -> list[PrefillWanted | PrefillDropped]:
        """What the front end is to ask of prefill engines, in order."""
        told, self._told = self._told, []
        return told

    # -- inside --

    def _begin(self, one: _Open) -> int:
        self.begun += 1
        self._open[self.begun] = one
        self._books.open_transfers += 1
        one.request.in_flight += 1
        return self.begun

    def _end(self, number: int) -> _Open | None:
        one = self._open.pop(number, None)
        if one is not None:
            self._books.open_transfers -= 1
            one.request.in_flight -= 1
            self._note_deadline()
        return one

    def _stop(self, number: int, one: _Open, *, is_late: bool = False) -> None:
        if one.is_stopped:
            return
        one.is_stopped = True
        self._orders.append(StopTransfer(number))
        if one.deadline is not None:
            one.deadline = None
            self._told.append(PrefillDropped(transfer=number, is_late=is_late))
            self._note_deadline()

    def _note_deadline(self) -> None:
        # They all have the same time, so the first that was begun is over first.
        self.deadline = next((one.deadline for one in self._open.values() if one.deadline is not None), None)
