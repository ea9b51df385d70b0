"""The account of rows and pages as the stages learn of them: who may write where, and what is read.

It sees only microbatch plans and their completions, never the engine's own structures. A request's stay in
a row is a tenancy, from the segment that opens it to the last microbatch with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.limits import Limits
from engine.memory import PageState, SlidingWindowPool
from engine.plan import Copies, Microbatch, Segment
from engine.scheduler import Books, Request, Scheduler
from scripted.core.violation import Violation

__all__ = ["Pages", "Tenancy", "check_leases"]


class Tenancy:
    """One stay in a row. ``ids`` are the request's tokens, shared with the account that appends to them.

    ``pages`` is the row of the stages' page tables, ``lost`` the indices in it that were given to another request
    since they were told. ``lora`` is the version of the LoRA that computes it. ``leaving`` tenancies end with their
    last microbatch in flight.
    """

    __slots__ = ("chain", "ids", "in_flight", "leaving", "lora", "lost", "pages", "planned", "rid", "row")

    def __init__(self, rid: str, row: int, ids: list[int], start: int, lora: int = 0) -> None:
        self.rid = rid
        self.row = row
        self.ids = ids
        self.planned = start
        self.lora = lora
        self.pages: list[int] = []
        self.lost: frozenset[int] = frozenset()
        self.chain: list[int] = []
        self.in_flight = 0
        self.leaving = False

    def uses_of(self, page: int) -> frozenset[int]:
        """The indices in its table at which it may use a page."""
        if page not in self.pages:
            return frozenset()
        return frozenset(index for index, one in enumerate(self.pages) if one == page) - self.lost

    def __repr__(self) -> str:
        return f"{self.rid} (row {self.row})"


class Pages:
    """``rows`` are the tenancies by row."""

    def __init__(self, limits: Limits) -> None:
        self.rows: dict[int, Tenancy] = {}
        self._size = limits.page_size
        # How many tenancies use each page.
        self._users: dict[int, int] = {}
        # A hash over all tokens up to the end of each page that is full and confirmed, wherever it was written.
        self._content: dict[int, int] = {}
        # The same of host pages: what was copied there, and what is on its way.
        self._on_host: dict[int, int] = {}
        self._to_host: dict[int, int] = {}

    def open(self, tenancy: Tenancy) -> None:
        """A request moves into a row, which must be empty."""
        if tenancy.row in self.rows:
            raise Violation(f"row {tenancy.row} is given to {tenancy.rid} while {self.rows[tenancy.row]} is in it")
        self.rows[tenancy.row] = tenancy

    def launch(self, segments: Sequence[Segment], tenancies: Sequence[Tenancy], copies: Copies | None = None) -> None:
        """Follow one microbatch: first its copies, then every page table, then what it writes and reads."""
        loaded = {} if copies is None else self._carry_out(copies)
        fresh: list[tuple[int, Tenancy]] = []
        for segment, tenancy in zip(segments, tenancies, strict=True):
            tenancy.in_flight += 1
            if segment.pages:
                fresh += [(page, tenancy) for page in self._tell(segment, tenancy, loaded)]
        for page, tenancy in fresh:
            self._give(page, tenancy)
        self._content.update(loaded)
        if loaded and (strange := loaded.keys() - {page for page, _ in fresh}):
            raise Violation(f"pages {sorted(strange)} are loaded from the host for no request of the microbatch")
        for segment, tenancy in zip(segments, tenancies, strict=True):
            end = segment.start + len(segment.token_ids)
            if tenancy.lost and min(tenancy.lost) * self._size < end:
                index = min(tenancy.lost)
                raise Violation(f"{tenancy} reads page {tenancy.pages[index]}, which was given to another request")
            if len(tenancy.pages) != -(-end // self._size):
                raise Violation(f"{tenancy} needs {-(-end // self._size)} pages, its table is {tenancy.pages}")

    def land(self, segment: Segment, tenancy: Tenancy, *, confirmed: bool, rejected: int = 0) -> None:
        """A segment came back. If it is ``confirmed``, the pages that it filled may be shared from now on.

        The pages of its last ``rejected`` tokens, guesses that were wrong, are its tenant's no more.
        """
        tenancy.in_flight -= 1
        size, end = self._size, segment.start + len(segment.token_ids) - rejected
        if confirmed:
            # With drafts a request may have ended before the last token that was guessed right.
            for index in range(segment.start // size, min(end, len(tenancy.ids)) // size):
                self._content[tenancy.pages[index]] = self._hash_of(tenancy, index)
        if rejected:
            self._trim(tenancy, -(-end // size))
        if tenancy.leaving and not tenancy.in_flight:
            self.close(tenancy)

    def _carry_out(self, copies: Copies) -> dict[int, int]:
        """Note what the host holds then; returns what the pages hold that are loaded from it."""
        for page, host in copies.out:
            if page not in self._content:
                raise Violation(f"page {page} is copied to host page {host}, but it is not full of confirmed tokens")
            self._on_host.pop(host, None)
            self._to_host[host] = self._content[page]
        for host, page in copies.into:
            if host not in self._on_host:
                raise Violation(f"page {page} is loaded from host page {host}, which holds nothing that was confirmed")
        return {page: self._on_host[host] for host, page in copies.into}

    def land_copies(self, copies: Copies | None, *, failed: bool) -> None:
        """The microbatch with these copies is back; of one that failed they are of no use."""
        if copies is None:
            return
        for _, host in copies.out:
            content = self._to_host.pop(host)
            if not failed:
                self._on_host[host] = content
        for _, page in copies.into if failed else ():
            self._content.pop(page, None)

    def _trim(self, tenancy: Tenancy, kept: int) -> None:
        for index, page in enumerate(tenancy.pages[kept:], kept):
            if index not in tenancy.lost:
                self._forget_user(page)
        del tenancy.pages[kept:]
        tenancy.lost = frozenset(index for index in tenancy.lost if index < kept)

    def leave(self, tenancy: Tenancy) -> None:
        """A request gives its memory back, as soon as nothing with it is in flight."""
        tenancy.leaving = True
        if not tenancy.in_flight:
            self.close(tenancy)

    def close(self, tenancy: Tenancy) -> None:
        """The end of a tenancy: its row and its pages may be given to others."""
        del self.rows[tenancy.row]
        for index, page in enumerate(tenancy.pages):
            if index not in tenancy.lost:
                self._forget_user(page)

    def flush(self) -> None:
        """No page can be shared with a later request any more."""
        self._content.clear()
        self._on_host.clear()
        self._to_host.clear()

    def compare(self, scheduler: Scheduler, microbatch: Microbatch | None) -> None:
        """Pages that are owned were told to the stages, and what ``microbatch`` uses is owned. Raises Violation."""
        memory = scheduler.memory
        locked = 0 if scheduler.pressure.pins else memory.tree.locked_pages
        owned, told = memory.pages.held + locked, len(self._users)
        # A page that was swapped for the tree's own, which its tenant was not told of yet, may be another's by now.
        if owned > told and owned > told + sum(len(tenancy.lost) for tenancy in self.rows.values()):
            raise Violation(f"the engine holds or locks {owned} pages, the stages were told to use only {told}")
        if microbatch is None:
            return
        state = memory.pages.state
        free = [page for segment in microbatch.segments for page in segment.pages if not state(page)]
        if free:
            raise Violation(f"the last microbatch uses pages {free}, which the engine books as free")
        if memory.sliding_window is not None:
            _check_window_pages(
                memory.sliding_window, [p for one in microbatch.segments for p in one.window_pages if p >= 0]
            )

    def _tell(self, segment: Segment, tenancy: Tenancy, loaded: Mapping[int, int]) -> list[int]:
        """Bring a page table up to date; returns the pages that the tenancy gets to write in."""
        first, size = segment.page_start, self._size
        if first > len(tenancy.pages):
            raise Violation(f"{tenancy} has {len(tenancy.pages)} pages and is told of the one at {first}")
        before, tenancy.pages[first:] = tenancy.pages[first:], segment.pages
        for index, page in enumerate(before, first):
            if index in tenancy.lost:
                tenancy.lost -= {index}
            else:
                self._forget_user(page)
        fresh = []
        for index, page in enumerate(segment.pages, first):
            self._users[page] = self._users.get(page, 0) + 1
            if self._users[page] > 1 and len(tenancy.uses_of(page)) > 1:
                raise Violation(f"{tenancy} has page {page} twice in its table {tenancy.pages}")
            if index - first < len(before) and before[index - first] == page:
                continue
            if index >= segment.start // size:
                fresh.append(page)
            elif page in loaded:
                fresh.append(page)
                if loaded[page] != self._hash_of(tenancy, index):
                    raise Violation(f"{tenancy} loads page {page} at index {index}, which does not hold its tokens")
            elif self._content.get(page) != self._hash_of(tenancy, index):
                raise Violation(f"{tenancy} shares page {page} at index {index}, which does not hold its tokens")
        return fresh

    def _give(self, page: int, tenancy: Tenancy) -> None:
        """Other tenancies that were told of this page may not use it until they are sent a new one."""
        self._content.pop(page, None)
        if self._users[page] == 1:
            return
        for other in self.rows.values():
            uses = other.uses_of(page)
            if other is tenancy or not uses:
                continue
            if other.in_flight:
                raise Violation(f"page {page} is given to {tenancy} while {other} uses it in flight")
            other.lost |= uses
            self._users[page] -= len(uses)

    def _forget_user(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]

    def _hash_of(self, tenancy: Tenancy, index: int) -> int:
        """The hash over a request's tokens up to the end of its page at ``index``, and over what computes them."""
        chain, size = tenancy.chain, self._size
        while len(chain) <= index:
            start = len(chain) * size
            chain.append(hash((chain[-1] if chain else tenancy.lora, *tenancy.ids[start : start + size])))
        return chain[index]


def check_leases(books: Books, limits: Limits) -> None:
    """No lease has a page for tokens that are not planned, and what is confirmed of a prompt is cached for others."""
    size, caching = limits.page_size, limits.radix_cache
    for request in books.running.values():
        _check_lease(request, request.prefill_tokens if caching else 0, size)
    chunked = books.chunked
    if chunked is not None:
        _check_lease(chunked, chunked.planned_tokens if caching and not chunked.in_flight else 0, size)


def _check_lease(request: Request, confirmed: int, size: int) -> None:
    lease = request.lease
    if lease is None:
        raise Violation(f"{request} is computed without memory")
    pages, most = len(lease.pages), -(-request.planned_tokens // size)
    if pages > most:
        raise Violation(f"{request.rid} has {pages} pages for {request.planned_tokens} tokens, {most} are enough")
    if lease.cached_pages < confirmed // size:
        raise Violation(f"{confirmed} tokens of {request.rid} are confirmed, but not in the tree: {lease}")


def _check_window_pages(windows: SlidingWindowPool, told: list[int]) -> None:
    """Window pages that were told just now are owned, and each is told once unless the tree shares it."""
    state = windows.pages.state
    free = [page for page in told if not state(page)]
    twice = [page for page in told if told.count(page) > 1 and state(page) is not PageState.CACHED]
    if free or twice:
        raise Violation(f"the last microbatch uses window pages {free or twice}, booked as free or another's")
