"""Transfers of the executable specification: prompts that are received from others, and prompts that are sent.

Names in bold are the rules of docs/rules.md. This module ends no request and frees nothing.
"""

from __future__ import annotations

from typing import Final

from engine.core.limits import Limits
from engine.core.messages import PrefillDropped, PrefillWanted
from scripted_lockstep.specification.expected import SpecifiedOrder
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.request import SpecifiedRequest as Request

_NO_LOGPROBS: Final = -1


class SpecifiedTransfer:
    """Pages of a request from ``first`` on. ``until`` is its deadline, None for an outgoing or stopped transfer."""

    def __init__(self, request: Request, first: int, pages: int, until: float | None) -> None:
        self.request, self.first, self.pages, self.until, self.is_stopped = request, first, pages, until, False


class SpecifiedTransfers:
    """Tracks the ``open`` transfers by number: the stages have not ended them."""

    def __init__(self, limits: Limits, memory: SpecifiedMemory) -> None:
        self._limits, self._memory = limits, memory
        # Saves a scan in every step of an engine without a role.
        self._has_role = limits.receives or limits.prefills
        self.open: dict[int, SpecifiedTransfer] = {}
        self._begun = 0
        self.orders: list[SpecifiedOrder] = []
        self.messages: list[PrefillWanted | PrefillDropped] = []

    def take_outgoing(self) -> tuple[list[SpecifiedOrder], list[PrefillWanted | PrefillDropped]]:
        """Return and clear this step's orders, and its messages to prefill engines."""
        outgoing = self.orders, self.messages
        if self.orders or self.messages:
            self.orders, self.messages = [], []
        return outgoing

    @property
    def transferring(self) -> list[Request]:
        """The requests that receive their prompt, or that send the last pages of it."""
        owners = self._memory.owners if self._has_role else ()
        return [one for one in owners if one.is_receiving or one.is_delivering]

    @property
    def deadline(self) -> float | None:
        """The earliest deadline of an open transfer."""
        ends = [one.until for one in self.open.values() if one.until is not None] if self.open else None
        return min(ends) if ends else None

    @property
    def next_received(self) -> Request | None:
        """**Receive**: the request whose transfer has ended and that was admitted first; it continues next."""
        owners = self._memory.owners if self._has_role else ()
        return next((one for one in owners if one.is_receiving and not one.in_flight), None) if owners else None

    @staticmethod
    def may_receive(request: Request) -> bool:
        """**Receive**: whether a request may: it has no LoRA and asks for no prompt logprobs."""
        is_plain = request.lora is None and request.message.prompt_logprobs_from == _NO_LOGPROBS
        return is_plain and request.prefill_at is not None

    def receive(self, request: Request, now: float, weights: str) -> bool:
        """**Receive**: the full pages that an admitted request does not hit, except the last token's."""
        size, at = self._limits.page_size, request.prefill_at
        first, end = request.pages, (len(request.ids) - 1) // size
        if at is None or not self.may_receive(request) or end <= first:
            return False
        self._memory.extend(request, end * size)
        request.is_receiving = True
        request.hit_tokens = request.planned_tokens = end * size
        self._begin(SpecifiedTransfer(request, first, end - first, now + self._limits.prefill_timeout_s))
        self.orders.append(("receive", self._begun, end - first))
        message = request.message
        self.messages.append(
            PrefillWanted(
                rid=request.rid, transfer=self._begun, at=at, ids=tuple(request.ids[: end * size]), first_page=first,
                weights=weights, priority=message.priority, cache_salt=message.cache_salt,
            )
        )  # fmt: skip
        return True

    def send(self, request: Request, confirmed: int) -> None:
        """**Send**: the full pages that are confirmed and not yet sent."""
        deliver, end = request.message.deliver, confirmed // self._limits.page_size
        if deliver is None:
            return
        if end > request.sent_pages:
            self._begin(SpecifiedTransfer(request, request.sent_pages, end - request.sent_pages, None))
            place = request.sent_pages - deliver.first_page
            self.orders.append(("send", self._begun, end - request.sent_pages, deliver.to, deliver.transfer, place))
            request.sent_pages = end
        if request.in_flight and confirmed == request.goal_tokens and not request.is_leaving:
            request.is_delivering = True

    def end(self, number: int, pages: int | None) -> Request | None:
        """**Receive**: the request continues from the pages that came; the stages use no page of it any more."""
        one = self.open.pop(number, None)
        if one is None:
            return None
        one.request.in_flight -= 1
        if pages is not None and pages < one.pages:
            one.request.prefill_at = None
        if pages is not None and one.request.is_receiving:
            one.request.hit_tokens = one.request.planned_tokens = (one.first + pages) * self._limits.page_size
            self._memory.trim(one.request)
        return one.request

    def fail(self, number: int, *, is_late: bool = False) -> None:
        """**Receive**: stop a transfer that failed; the request computes its prompt itself."""
        if number in self.open and self.open[number].request.message.deliver is None:
            self.open[number].request.prefill_at = None
            self._stop(number, is_late=is_late)

    def fail_overdue(self, now: float) -> None:
        """**Receive**: fail the transfers that take longer than prefill_timeout_s."""
        for number, one in self.open.items():
            if one.until is not None and now >= one.until:
                self.fail(number, is_late=True)

    def stop(self, request: Request) -> None:
        """**Receive**, **Send**: stop the transfers of a request that has ended or is retracted."""
        for number, one in self.open.items():
            if one.request is request:
                self._stop(number)

    def fail_all(self) -> None:
        """**Death**: no transfer is open any more."""
        self.open, self.orders = {}, []

    def _begin(self, one: SpecifiedTransfer) -> None:
        self._begun += 1
        self.open[self._begun] = one
        one.request.in_flight += 1

    def _stop(self, number: int, *, is_late: bool = False) -> None:
        one = self.open[number]
        if one.is_stopped:
            return
        one.is_stopped = True
        self.orders.append(("stop", number))
        if one.until is not None:
            one.until = None
            self.messages.append(PrefillDropped(transfer=number, is_late=is_late))
