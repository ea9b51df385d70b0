"""Transfers of the executable specification: prompts that are received from others, and prompts that are sent.

Names in bold are the rules of docs/rules.md. This module ends no request and frees
nothing.
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
    """Follows transfers; ``open`` are those that the stages have not ended, by number."""

    def __init__(self, limits: Limits, memory: SpecifiedMemory) -> None:
        self._limits, self._memory = limits, memory
        # Read in every step, mostly by engines without a role.
        self._has_role = limits.receives or limits.prefills
        self.open: dict[int, SpecifiedTransfer] = {}
        self._begun = 0
        self.orders: list[SpecifiedOrder] = []
        self.told: list[PrefillWanted | PrefillDropped] = []

    def take_news(self) -> tuple[list[SpecifiedOrder], list[PrefillWanted | PrefillDropped]]:
        """Take this step's orders, and its messages to prefill engines."""
        news = self.orders, self.told
        if self.orders or self.told:
            self.orders, self.told = [], []
        return news

    @property
    def transferring(self) -> list[Request]:
        """The requests that receive, or that deliver the last of their prompt."""
        owners = self._memory.owners if self._has_role else ()
        return [one for one in owners if one.is_receiving or one.is_delivering]

    @property
    def deadline(self) -> float | None:
        """The earliest deadline of an open transfer."""
        ends = [one.until for one in self.open.values() if one.until is not None] if self.open else None
        return min(ends) if ends else None

    @property
    def next_received(self) -> Request | None:
        """**Receive**: of the requests whose transfer has ended, the first to be admitted continues."""
        owners = self._memory.owners if self._has_role else ()
        return next((one for one in owners if one.is_receiving and not one.in_flight), None) if owners else None

    @staticmethod
    def may_receive(request: Request) -> bool:
        """**Receive**: not with a LoRA, nor with logprobs of its prompt."""
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
        self.told.append(
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
        """**Receive**: its prefill engine is not asked again."""
        if number in self.open and self.open[number].request.message.deliver is None:
            self.open[number].request.prefill_at = None
            self._stop(number, is_late=is_late)

    def fail_overdue(self, now: float) -> None:
        """**Receive**: for no longer than prefill_timeout_s."""
        for number, one in self.open.items():
            if one.until is not None and now >= one.until:
                self.fail(number, is_late=True)

    def stop(self, request: Request) -> None:
        """**Receive**, **Send**: when the request has ended, or is retracted while it receives."""
        for number, one in self.open.items():
            if one.request is request:
                self._stop(number)

    def give_up(self) -> None:
        """**Death**: the stages use nothing any more."""
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
            self.told.append(PrefillDropped(transfer=number, is_late=is_late))
