"""Transfers of KV between engines: a decode engine receives prompts that a prefill engine computes and sends.

Owns the transfers that the stages have not ended, the orders for them, and the deadlines of a decode engine. A page of
a transfer belongs to its request until the stages report that they no longer read or write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.errors import IntegrityError
from engine.core.messages import (
    Delivery,
    FinishReason,
    Generate,
    PagesReceived,
    PagesSent,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    Refusal,
    RefusalKind,
)
from engine.core.plan import ReceivePages, SendPages, StopTransfer, TransferOrder
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.ports import StepShare
from engine.core.scheduler.request import DELIVERING, DISPATCHED, RECEIVING, Request


@dataclass(slots=True)
class _Sending:
    """The destination of a prompt's KV. The first ``pages`` of the prompt are sent, or about to be sent."""

    to: Delivery
    pages: int


@dataclass(slots=True)
class _Open:
    """A transfer that the stages have not ended. ``deadline`` is None for an outgoing or a stopped one."""

    request: Request
    first_page: int
    pages: int
    deadline: float | None = None
    is_stopped: bool = False


class Transfers(Feature):
    """The transfers of one engine, by numbers that count from 1 and are never reused; ``begun`` is the last one.

    ``deadline``, in seconds, is when the oldest incoming transfer is stopped; None without one.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._limits = core.limits
        self._page_size = core.limits.page_size
        self._timeout_s = core.limits.prefill_timeout_s
        self._books = core.books
        self._memory = core.memory
        self._counters = core.counters
        # By request, until it is gone: its message, if that names a prefill engine, and its outgoing KV.
        self._wanting: dict[Request, Generate] = {}
        self._sending: dict[Request, _Sending] = {}
        self.begun = 0
        self._open: dict[int, _Open] = {}
        self._orders: list[TransferOrder] = []
        self._notices: list[PrefillWanted | PrefillDropped] = []

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            PagesReceived: self._on_pages_received,
            PagesSent: self._on_pages_sent,
            PrefillFailed: self._on_prefill_failed,
        }

    def _on_pages_received(self, received: PagesReceived) -> None:
        request = self.received(received)
        if request is not None:
            self._core.release_if_landed(request)

    def _on_pages_sent(self, sent: PagesSent) -> None:
        request = self.sent(sent)
        if request is None:
            return
        if sent.error is not None and not request.is_finished:
            self._core.end(request, FinishReason.ERROR, error=sent.error)
        elif request.is_prefilled and not (request.in_flight or request.is_finished):
            self._core.end_prefilled(request)
        else:
            self._core.release_if_landed(request)

    def _on_prefill_failed(self, failed: PrefillFailed) -> None:
        self.fail(failed.transfer)

    # -- requests --

    def refusal_of(self, message: Generate) -> Refusal | None:
        """Refuse a prompt whose KV this engine cannot deliver."""
        why = None if message.deliver is None else self._why_not_delivered(message.deliver)
        return None if why is None else Refusal(rid=message.rid, kind=RefusalKind.UNAVAILABLE, message=why)

    def _why_not_delivered(self, deliver: Delivery) -> str | None:
        if not self._limits.prefills:
            return "this engine sends no KV to others; ask one with role='prefill'"
        if len(deliver.to) != self._limits.pp_size:
            return (
                f"each stage sends KV to the same stage of the decode engine, which has {len(deliver.to)} stages, "
                f"this engine has {self._limits.pp_size}; give both the same pp_size"
            )
        if deliver.weights != self._books.weights:
            return (
                f"the KV must be computed with the weights {deliver.weights or 'of the start'!r}, this engine has "
                f"{self._books.weights or 'those of the start'!r}; update both"
            )
        return None

    def enter(self, request: Request, message: Generate) -> None:
        """Note the source or the destination of a request's KV.

        A prompt with a LoRA, which other engines number differently, or with prompt logprobs, which need its logits, is
        computed here.
        """
        if message.deliver is not None:
            self._sending[request] = _Sending(message.deliver, message.deliver.first_page)
        if message.prefill_at is not None and message.lora is None and message.prompt_logprobs_from < 0:
            self._wanting[request] = message
            request.may_be_received = True

    def forget(self, request: Request) -> None:
        self._wanting.pop(request, None)
        self._sending.pop(request, None)

    def change_weights(self) -> None:
        """End the requests that wait to be sent to an engine with other weights: they can never be sent."""
        for request in list(self._books.waiting):
            sending = self._sending.get(request)
            if sending is not None and sending.to.weights != self._books.weights:
                wanted = sending.to.weights or "of the start"
                why = f"its KV was wanted with the weights {wanted!r}, which an update has replaced; ask again"
                self._core.end(request, FinishReason.UNAVAILABLE, error=why)

    def call_back(self, request: Request) -> None:
        """Stop a request's incoming transfer. An outgoing one continues."""
        if request.place is RECEIVING:
            self.stop(request)

    def end(self, request: Request) -> None:
        if self._open:
            self.stop(request)

    # -- a decode engine --

    def start(self, request: Request) -> None:
        """Receive the uncached full pages of an admitted request, if another engine may compute them.

        Its last token is always computed here.
        """
        if not request.may_be_received:
            return
        lease, size, message = request.lease, self._page_size, self._wanting[request]
        assert lease is not None, f"{request} receives, but owns no memory"
        first, end = len(lease.pages), (len(request.ids) - 1) // size
        if end <= first:
            return
        assert message.prefill_at is not None, f"{request} is received, but names no prefill engine"
        if not self._memory.extend(lease, end * size):
            raise IntegrityError(f"{request} was admitted, but has no room for {end - first} pages of its prompt")
        request.place = RECEIVING
        request.prefill_start = request.planned_tokens = end * size
        self._books.transferring[request.rid] = request
        number = self._begin(_Open(request, first, end - first, self._core.now + self._timeout_s))
        self._orders.append(ReceivePages(number, tuple(lease.pages[first:])))
        wanted = PrefillWanted(
            rid=request.rid,
            transfer=number,
            at=message.prefill_at,
            ids=tuple(request.ids[: end * size]),
            first_page=first,
            weights=self._books.weights,
            priority=request.priority,
            cache_salt=message.cache_salt,
        )
        self._notices.append(wanted)
        self._note_deadline()

    def received(self, event: PagesReceived) -> Request | None:
        """End a transfer; return its request, which computes the missing pages itself, or None if unknown."""
        one = self._end(event.transfer)
        if one is None:
            return None
        if event.pages > one.pages:
            raise IntegrityError(f"{event.pages} pages arrived for {one.request}, but {one.pages} were requested")
        self._counters.pages_received += event.pages
        request = one.request
        if event.pages < one.pages:
            request.may_be_received = False
        if request.place is RECEIVING:
            request.prefill_start = request.planned_tokens = (one.first_page + event.pages) * self._page_size
            assert request.lease is not None, f"{request} received, but owns no memory"
            self._memory.trim(request.lease, request.planned_tokens)
        return request

    def fail(self, number: int, *, is_late: bool = False) -> None:
        """Continue with the pages that have arrived: the prefill engine sends no more, or ``is_late``."""
        one = self._open.get(number)
        if one is not None and one.request not in self._sending:
            one.request.may_be_received = False
            self._stop(number, one, is_late=is_late)

    def on_time(self, now: float) -> None:
        """Stop the transfers that have timed out, and continue without them."""
        for number, one in list(self._open.items()):
            if one.deadline is not None and one.deadline <= now:
                self.fail(number, is_late=True)

    # -- a prefill engine --

    def confirm(self, request: Request, tokens: int) -> None:
        """Send the confirmed full pages of a prompt that were not sent before.

        After the result of its last chunk the request is ``DELIVERING`` while pages are still being sent.
        """
        sending, lease = self._sending.get(request), request.lease
        if sending is None or request.is_finished:
            return
        assert lease is not None, f"{request} is sent, but owns no memory"
        first, end, to = sending.pages, tokens // self._page_size, sending.to
        if end > first:
            number = self._begin(_Open(request, first, end - first))
            place = first - to.first_page
            self._orders.append(SendPages(number, tuple(lease.pages[first:end]), to.to, to.transfer, place))
            sending.pages = end
        if request.in_flight and request.place is DISPATCHED and tokens == request.prefill_tokens:
            request.place = DELIVERING
            self._books.transferring[request.rid] = request

    def sent(self, event: PagesSent) -> Request | None:
        """End a transfer that the stages have ended; return its request, or None if unknown."""
        one = self._end(event.transfer)
        if one is None:
            return None
        self._counters.pages_sent += 0 if event.error is not None else one.pages
        return one.request

    # -- both --

    def stop(self, request: Request) -> None:
        """Have the stages end the transfers of a request."""
        for number, one in self._open.items():
            if one.request is request:
                self._stop(number, one)

    def lose_pipeline(self) -> None:
        """Drop all transfers: the stages no longer use any page."""
        for one in self._open.values():
            one.request.in_flight = 0
        self._open.clear()
        self._books.open_transfers = 0
        self._orders.clear()
        self.deadline = None

    def report(self, share: StepShare) -> bool:
        """Order the stages to send and receive, and report the prompts that prefill engines must compute."""
        if not (self._orders or self._notices):
            return False
        share["transfers"] = tuple(self._orders)
        for reply in self._notices:
            self._core.say(reply)
        self._orders.clear()
        self._notices.clear()
        return True

    # -- statistics, audit, checkpoint --

    def stats(self) -> dict[str, int]:
        return {"open_transfers": self._books.open_transfers}

    def in_flight(self) -> Iterable[Request]:
        """Return the request of each transfer that the stages have not ended."""
        return [one.request for one in self._open.values()] if self._open else ()

    def check(self, live: Sequence[Request]) -> None:
        """Check that the open transfers match their counts, and that only live requests receive or deliver."""
        if len(self._open) != self._books.open_transfers:
            raise IntegrityError(f"{len(self._open)} transfers are open, {self._books.open_transfers} are counted")
        if not (self._open or self._wanting or self._sending) and self.deadline is None:
            return
        awaited = [one.deadline for one in self._open.values() if one.deadline is not None]
        if self.deadline != min(awaited, default=None):
            raise IntegrityError(f"the first transfer times out at {awaited}, but ``deadline`` is {self.deadline}")
        if strange := {*self._wanting, *self._sending}.difference(live):
            raise IntegrityError(f"{list(strange)} are gone, but still have a transfer")

    def snapshot(self, parts: CheckpointParts) -> None:
        parts["transfers"] = self.begun

    def restore(self, checkpoint: Checkpoint) -> None:
        self.begun = checkpoint.transfers

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
            self._notices.append(PrefillDropped(transfer=number, is_late=is_late))
            self._note_deadline()

    def _note_deadline(self) -> None:
        # All transfers have the same time limit, so the first one begun times out first.
        self.deadline = next((one.deadline for one in self._open.values() if one.deadline is not None), None)
