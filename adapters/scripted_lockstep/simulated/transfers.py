"""KV transfers of a simulated engine, to other engines and from them.

A single engine has an imaginary peer, which sends the requested pages and takes all. A transfer then ends in the step
after its order, unless transfers are held or the peer fails. In a fleet, both ends are engines of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

import msgspec

from engine.core.messages import Generate, PagesReceived, PagesSent, PrefillWanted, Reply, TransferEvent
from engine.core.plan import ReceivePages, SendPages, StopTransfer, TransferOrder
from scripted.core.tokens import links_of

GONE: Final = "the decode engine is gone"

# The KV of a full page: the fingerprint before it and of each of its slots.
PageContent = list[int]


@dataclass(slots=True)
class _Open:
    """An open transfer. ``came`` has the received pages by index; ``failed_at`` is the page at which it failed."""

    order: ReceivePages | SendPages
    wanted: PrefillWanted | None = None
    came: dict[int, PageContent] = field(default_factory=dict)
    failed_at: int | None = None
    is_stopped: bool = False
    # In a fleet: whether the pages have left, and whether they have arrived.
    has_left: bool = False
    verdict: ConfirmedPages | None = None


class SentPages(msgspec.Struct, frozen=True):
    """Pages on their way ``to`` an engine: the pages from ``first`` on of its transfer of this number.

    ``sending`` is the sender's number of the transfer.
    """

    is_bulk: ClassVar[bool] = True

    to: str
    transfer: int
    first: int
    contents: tuple[PageContent, ...]
    sending: int


class ConfirmedPages(msgspec.Struct, frozen=True):
    """The pages have arrived; with an ``error`` the other engine has dropped them."""

    sending: int
    error: str | None = None


class Pool(Protocol):
    """The pages of an engine."""

    def content(self, page: int) -> PageContent:
        """Return the content of a page."""
        ...

    def receive(self, page: int, content: PageContent) -> None:
        """Overwrite a page."""
        ...


class SimulatedTransfers:
    """Tracks the ``open`` transfers by number.

    ``is_imagined``: the peer is imaginary, as it is outside a fleet. ``sent`` has the pages that the fleet is to carry.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.open: dict[int, _Open] = {}
        self.is_imagined = True
        self.is_holding = False
        self.sent: list[SentPages] = []

    # -- orders --

    def order(self, order: TransferOrder) -> None:
        """Begin a transfer, or stop one."""
        if not isinstance(order, StopTransfer):
            self.open[order.transfer] = _Open(order)
        elif (one := self.open.get(order.transfer)) is not None:
            one.is_stopped = True
            if self.is_imagined and isinstance(one.order, ReceivePages) and one.failed_at is None:
                # A stop meets pages on their way: all of them have arrived already, or all but the last.
                one.failed_at = len(one.order.pages) - order.transfer % 2 if one.wanted is not None else 0

    def want(self, replies: Iterable[Reply]) -> None:
        """Note which prompt each open transfer is to receive."""
        for reply in replies:
            if isinstance(reply, PrefillWanted) and reply.transfer in self.open:
                self.open[reply.transfer].wanted = reply

    # -- looking --

    @property
    def holds_some(self) -> bool:
        """Return whether a transfer is open only because transfers are held."""
        return self.is_holding and any(not one.is_stopped for one in self.open.values())

    @property
    def ends_soon(self) -> bool:
        """Return whether a transfer was stopped or has failed, so that it ends in the next step."""
        return any(one.is_stopped or one.failed_at is not None for one in self.open.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the open transfers, oldest first."""
        return tuple(self.open)

    def is_received(self, number: int) -> bool:
        """Whether this engine receives the transfer."""
        return isinstance(self.open[number].order, ReceivePages)

    def comes(self, number: int) -> int:
        """Return how many pages still arrive for a stopped transfer."""
        return self.open[number].failed_at or 0

    # -- the other end --

    def fail(self, number: int, pages: int) -> None:
        """Make the other engine fail after this many pages. A stopped transfer is left alone."""
        if not self.open[number].is_stopped:
            self.open[number].failed_at = pages

    def confirm(self, verdict: ConfirmedPages) -> None:
        """Note whether the other engine received the pages."""
        if verdict.sending in self.open:
            self.open[verdict.sending].verdict = verdict

    def break_off(self, other: str) -> None:
        """Break the connections to an engine: pages on their way there are lost."""
        for one in self.open.values():
            if isinstance(one.order, SendPages) and other in one.order.to:
                one.failed_at = 0

    def arrive(self, pages: SentPages) -> str | None:
        """Receive pages. Returns the reason if they are dropped because the transfer has ended or was stopped."""
        one = self.open.get(pages.transfer)
        if one is None or one.is_stopped or not isinstance(one.order, ReceivePages):
            return f"nothing is received for transfer {pages.transfer}, or not any more"
        one.came |= dict(enumerate(pages.contents, pages.first))
        return None

    def take_ended(
        self, pool: Pool, root: int, deliveries: Iterable[Generate], corruptions: list[str]
    ) -> list[TransferEvent]:
        """Take the ends of transfers that are due, in their order. ``root`` is the fingerprint before every prompt.

        ``deliveries`` are the prompts that are sent; a page that is sent with other content is added to
        ``corruptions``.
        """
        ended: list[TransferEvent] = []
        for number, one in list(self.open.items()):
            event: TransferEvent | None
            if isinstance(one.order, ReceivePages):
                event = self._end_receiving(one, one.order, pool, root)
            else:
                event = self._failed_sending(one, one.order)
                if event is None and not self.is_holding:
                    event = self._send(one, one.order, pool, root, deliveries, corruptions)
            if event is not None:
                del self.open[number]
                ended.append(event)
        return ended

    def lose(self) -> None:
        """Lose all transfers with the stages."""
        self.open.clear()
        self.sent.clear()

    # -- inside --

    def _end_receiving(self, one: _Open, order: ReceivePages, pool: Pool, root: int) -> PagesReceived | None:
        """End a transfer whose pages have all arrived, or that was stopped: then pages count up to the first gap."""
        count, number = len(order.pages), order.transfer
        if self.is_imagined and one.wanted is not None:
            most = (0 if self.is_holding else count) if one.failed_at is None else one.failed_at
            one.came |= dict(enumerate(self._contents_of(one.wanted, root)[:most]))
        whole = next((index for index in range(count) if index not in one.came), count)
        if whole < count and not one.is_stopped:
            return None
        for index, page in enumerate(order.pages[:whole]):
            pool.receive(page, one.came[index])
        return PagesReceived(transfer=number, pages=whole)

    def _failed_sending(self, one: _Open, order: SendPages) -> PagesSent | None:
        if one.is_stopped or one.failed_at is not None:
            return PagesSent(transfer=order.transfer, error="stopped" if one.is_stopped else GONE)
        return None

    def _send(
        self,
        one: _Open,
        order: SendPages,
        pool: Pool,
        root: int,
        deliveries: Iterable[Generate],
        corruptions: list[str],
    ) -> PagesSent | None:
        """Send pages, and wait for the confirmation; until then the pages must keep their content."""
        if one.has_left and one.verdict is None:
            return None
        contents = tuple([list(pool.content(page)) for page in order.pages])
        for message in deliveries:
            deliver = message.deliver
            if deliver is not None and (deliver.to, deliver.transfer) == (order.to, order.to_transfer):
                corruptions += self._wrong_pages(message, deliver.first_page + order.first, contents, root)
                break
        else:
            corruptions.append(f"pages {order.pages} are sent for transfer {order.to_transfer}, which nobody asked for")
        if self.is_imagined or one.verdict is not None:
            return PagesSent(transfer=order.transfer, error=None if one.verdict is None else one.verdict.error)
        one.has_left = True
        self.sent.append(SentPages(order.to[0], order.to_transfer, order.first, contents, order.transfer))
        return None

    def _wrong_pages(self, message: Generate, first: int, contents: Iterable[PageContent], root: int) -> Iterator[str]:
        """Describe each sent page that does not hold the KV of its prompt."""
        size, links = self._page_size, links_of(root, message.prompt_ids)
        for index, content in enumerate(contents, first):
            if content != links[index * size : (index + 1) * size + 1]:
                yield f"page {index} of {message.rid} is sent, but does not hold the KV of its prompt"

    def _contents_of(self, wanted: PrefillWanted, root: int) -> list[PageContent]:
        size, links = self._page_size, links_of(root, wanted.ids)
        starts = range(wanted.first_page * size, len(wanted.ids), size)
        return [list(links[start : start + size + 1]) for start in starts]
