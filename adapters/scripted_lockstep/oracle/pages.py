"""The account of rows and pages as the stages see them: who may write where, and what each read finds.

For stages that do not report their reads. Page numbers come from plans and completions alone; owners and tokens come
from the specification. A request holds its row from the segment with its sampling to its last microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from engine.core.limits import Limits
from engine.core.messages import Completion, Event, PagesReceived, PipelineFailed
from engine.core.plan import Copies, Microbatch, ReceivePages, Segment
from engine.core.scheduler import StepResult
from scripted.core.violation import Violation
from scripted_lockstep.specification.request import SpecifiedRequest
from scripted_lockstep.specification.specification import Specification
from scripted_lockstep.specification.transfers import SpecifiedTransfer


class RowHolder:
    """A request that holds a row. ``pages`` is its row in the stages' page tables.

    ``lost`` has the indices of pages that another request got after the stages learned of them. ``kv_key`` is the
    version of the LoRA with the cache salt.
    """

    __slots__ = ("chain", "in_flight", "kv_key", "lost", "pages", "request", "row")

    def __init__(self, request: SpecifiedRequest, row: int, lora: int) -> None:
        self.request = request
        self.row = row
        self.kv_key = (lora, request.message.cache_salt)
        self.pages: list[int] = []
        self.lost: frozenset[int] = frozenset()
        self.chain: list[int] = []
        self.in_flight = 0

    def uses_of(self, page: int) -> frozenset[int]:
        """Return the indices in its table at which it may use a page."""
        if page not in self.pages:
            return frozenset()
        return frozenset(index for index, one in enumerate(self.pages) if one == page) - self.lost

    def __repr__(self) -> str:
        return f"{self.request.rid} (row {self.row})"


class Pages:
    """Follows the pages of one engine; ``rows`` has the holder of each row."""

    def __init__(self, limits: Limits) -> None:
        self.rows: dict[int, RowHolder] = {}
        self._size = limits.page_size
        self._flights: deque[tuple[Microbatch, list[RowHolder]]] = deque()
        # The number of holders that use each page.
        self._users: dict[int, int] = {}
        # A hash over all tokens up to the end of each full and confirmed page, wherever it was written.
        self._content: dict[int, int] = {}
        # The same hashes for host pages, and for copies on their way to the host.
        self._on_host: dict[int, int] = {}
        self._to_host: dict[int, int] = {}
        # The pages that a transfer receives into, and the transfer, by number.
        self._receiving: dict[int, tuple[tuple[int, ...], SpecifiedTransfer]] = {}
        # The root of the cache, which a flush replaces.
        self._cache: object = None

    def follow(self, events: Sequence[Event], result: StepResult, specification: Specification) -> None:
        """Follow a step that ``specification`` has followed. Raises Violation."""
        microbatch = result.microbatch
        for event in events:
            if isinstance(event, PagesReceived):
                self._receive(event)
            elif isinstance(event, Completion) and self._flights and event.microbatch_id == self._flights[0][0].id:
                self._land(event)
            elif isinstance(event, PipelineFailed):
                while self._flights:
                    self._land(Completion(microbatch_id=self._flights[0][0].id, error=str(event)))
        memory = specification.memory
        if memory.cache is not self._cache:
            self._cache = memory.cache
            self._content.clear()
            self._on_host.clear()
            self._to_host.clear()
        owners = {id(owner) for owner in memory.owners}
        for holder in [one for one in self.rows.values() if id(one.request) not in owners]:
            self._close(holder)
        for order in result.transfers:
            if isinstance(order, ReceivePages):
                self._expect(order, specification.transfers.open[order.transfer])
        if microbatch is not None:
            self._launch(microbatch, specification)

    def _expect(self, order: ReceivePages, transfer: SpecifiedTransfer) -> None:
        """Expect arriving KV in these pages: nothing may use them from now on."""
        for page in order.pages:
            self._content.pop(page, None)
            for holder in self.rows.values():
                if holder.in_flight and holder.uses_of(page):
                    raise Violation(f"page {page} is to be received while {holder} uses it in flight")
        self._receiving[order.transfer] = order.pages, transfer

    def _receive(self, event: PagesReceived) -> None:
        """Take the pages that arrived, which hold the requested prompt."""
        pages, transfer = self._receiving.pop(event.transfer, ((), None))
        if transfer is not None:
            receiver = RowHolder(transfer.request, -1, 0)
            for index, page in enumerate(pages[: event.pages], transfer.first):
                self._content[page] = self._hash_of(receiver, index)

    def _launch(self, microbatch: Microbatch, specification: Specification) -> None:
        """Follow a launch: its copies, then every page table, then its writes and reads."""
        loaded = {} if microbatch.copies is None else self._carry_out(microbatch.copies)
        # Holders that restart in this step leave first, because two may swap rows.
        begun = [specification.live[one.rid] for one in microbatch.segments if one.sampling is not None]
        for holder in [one for one in self.rows.values() if one.request in begun]:
            self._close(holder)
        holders = [self._holder_of(segment, specification) for segment in microbatch.segments]
        self._flights.append((microbatch, holders))
        fresh: list[tuple[int, RowHolder]] = []
        for segment, holder in zip(microbatch.segments, holders, strict=True):
            holder.in_flight += 1
            if segment.pages:
                fresh += [(page, holder) for page in self._tell(segment, holder, loaded)]
        for page, holder in fresh:
            self._give(page, holder)
        self._content.update(loaded)
        if loaded and (strange := loaded.keys() - {page for page, _ in fresh}):
            raise Violation(f"pages {sorted(strange)} are loaded from the host for no request of the microbatch")
        for segment, holder in zip(microbatch.segments, holders, strict=True):
            end = segment.start + len(segment.token_ids)
            if holder.lost and min(holder.lost) * self._size < end:
                index = min(holder.lost)
                raise Violation(f"{holder} reads page {holder.pages[index]}, which was given to another request")
            if len(holder.pages) != -(-end // self._size):
                raise Violation(f"{holder} needs {-(-end // self._size)} pages, its table is {holder.pages}")

    def _holder_of(self, segment: Segment, specification: Specification) -> RowHolder:
        """Return the holder of a segment's row, a new one if the segment has sampling."""
        request, holder = specification.live[segment.rid], self.rows.get(segment.row)
        if segment.sampling is None:
            if holder is None or holder.request is not request:
                raise Violation(f"{segment.rid} goes on in row {segment.row}, in which is {holder}")
            return holder
        if self.rows.get(segment.row) is not None:
            raise Violation(f"row {segment.row} is given to {segment.rid} while {holder} is in it")
        self.rows[segment.row] = holder = RowHolder(request, segment.row, segment.lora)
        return holder

    def _land(self, completion: Completion) -> None:
        """Take a microbatch's result. The pages that it filled without an error may be shared from now on."""
        microbatch, holders = self._flights.popleft()
        failed, accepted = completion.error is not None, iter(completion.accepted)
        if microbatch.copies is not None:
            self._land_copies(microbatch.copies, failed=failed)
        for segment, holder in zip(microbatch.segments, holders, strict=True):
            holder.in_flight -= 1
            if failed:
                continue
            rejected = segment.drafts - next(accepted) if segment.drafts else 0
            end = segment.start + len(segment.token_ids) - rejected
            # With drafts a request may have ended before the last accepted token.
            for index in range(segment.start // self._size, min(end, len(holder.request.ids)) // self._size):
                self._content[holder.pages[index]] = self._hash_of(holder, index)
            if rejected:
                # The holder loses the pages of rejected drafts.
                self._trim(holder, -(-end // self._size))

    def _carry_out(self, copies: Copies) -> dict[int, int]:
        """Note the new content of the host. Returns the content of the pages that are loaded from it."""
        for page, host in copies.out:
            if page not in self._content:
                raise Violation(f"page {page} is copied to host page {host}, but it is not full of confirmed tokens")
            self._on_host.pop(host, None)
            self._to_host[host] = self._content[page]
        for host, page in copies.into:
            if host not in self._on_host:
                raise Violation(f"page {page} is loaded from host page {host}, which holds nothing that was confirmed")
        return {page: self._on_host[host] for host, page in copies.into}

    def _land_copies(self, copies: Copies, *, failed: bool) -> None:
        """Take the result of a microbatch with these copies; failed copies are void."""
        for _, host in copies.out:
            content = self._to_host.pop(host)
            if not failed:
                self._on_host[host] = content
        for _, page in copies.into if failed else ():
            self._content.pop(page, None)

    def _trim(self, holder: RowHolder, kept: int) -> None:
        for index, page in enumerate(holder.pages[kept:], kept):
            if index not in holder.lost:
                self._forget_user(page)
        del holder.pages[kept:]
        holder.lost = frozenset(index for index in holder.lost if index < kept)

    def _close(self, holder: RowHolder) -> None:
        """Release a row: others may get it and its pages."""
        del self.rows[holder.row]
        for index, page in enumerate(holder.pages):
            if index not in holder.lost:
                self._forget_user(page)

    def _tell(self, segment: Segment, holder: RowHolder, loaded: Mapping[int, int]) -> list[int]:
        """Update a page table. Returns the pages that the holder will write."""
        first, size = segment.page_start, self._size
        if first > len(holder.pages):
            raise Violation(f"{holder} has {len(holder.pages)} pages and is told of the one at {first}")
        before, holder.pages[first:] = holder.pages[first:], segment.pages
        for index, page in enumerate(before, first):
            if index in holder.lost:
                holder.lost -= {index}
            else:
                self._forget_user(page)
        fresh = []
        own = {page for index, page in enumerate(holder.pages[:first]) if index not in holder.lost}
        for index, page in enumerate(segment.pages, first):
            self._users[page] = self._users.get(page, 0) + 1
            if page in own:
                raise Violation(f"{holder} has page {page} twice in its table {holder.pages}")
            own.add(page)
            if index - first < len(before) and before[index - first] == page:
                continue
            if index >= segment.start // size:
                fresh.append(page)
            elif page in loaded:
                fresh.append(page)
                if loaded[page] != self._hash_of(holder, index):
                    raise Violation(f"{holder} loads page {page} at index {index}, which does not hold its tokens")
            elif self._content.get(page) != self._hash_of(holder, index):
                raise Violation(f"{holder} shares page {page} at index {index}, which does not hold its tokens")
        return fresh

    def _give(self, page: int, holder: RowHolder) -> None:
        """Take a page from all other holders, which must not use it until they get a new one."""
        self._content.pop(page, None)
        if self._users[page] == 1:
            return
        for other in self.rows.values():
            uses = other.uses_of(page)
            if other is holder or not uses:
                continue
            if other.in_flight:
                raise Violation(f"page {page} is given to {holder} while {other} uses it in flight")
            other.lost |= uses
            self._users[page] -= len(uses)

    def _forget_user(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]

    def _hash_of(self, holder: RowHolder, index: int) -> int:
        """Return the hash over a request's tokens up to the end of its page at ``index``, and over its KV key."""
        chain, size = holder.chain, self._size
        while len(chain) <= index:
            start = len(chain) * size
            chain.append(hash((chain[-1] if chain else holder.kv_key, *holder.request.ids[start : start + size])))
        return chain[index]
