"""The ledger's account of rows and pages, as the stages are told of them: who may write where, and what is read.

Fed only by microbatch plans and their completions; it never looks at the engine's own structures. A request's stay in
a row is a tenancy, from the segment that opens it to the last microbatch with it.
"""

from __future__ import annotations

from engine.errors import IntegrityError
from engine.limits import Limits
from engine.plan import Segment

__all__ = ["PageAccount", "Tenancy"]


class Tenancy:
    """One stay in a row. ``ids`` are the request's tokens, shared with whoever appends to them.

    ``pages`` is the row of the stages' page tables, ``lost`` the indices in it that were given to somebody else since
    they were told. ``leaving`` tenancies end with their last microbatch in flight.
    """

    __slots__ = ("chain", "ids", "in_flight", "leaving", "lost", "pages", "planned", "rid", "row")

    def __init__(self, rid: str, row: int, ids: list[int], start: int) -> None:
        self.rid = rid
        self.row = row
        self.ids = ids
        self.planned = start
        self.pages: list[int] = []
        self.lost: set[int] = set()
        self.chain: list[int] = []
        self.in_flight = 0
        self.leaving = False

    def __repr__(self) -> str:
        return f"{self.rid} (row {self.row})"


class PageAccount:
    """``rows`` are the tenancies by row. ``in_use`` counts the pages that they were told to use."""

    def __init__(self, limits: Limits) -> None:
        self.rows: dict[int, Tenancy] = {}
        self._size = limits.page_size
        self._users: dict[int, list[Tenancy]] = {}
        # A hash over all tokens up to the end of each page that is full and confirmed, wherever it was written.
        self._content: dict[int, int] = {}

    @property
    def in_use(self) -> int:
        """Pages that some tenancy was told to use, each counted once."""
        return len(self._users)

    @property
    def lost(self) -> int:
        """Pages that a tenancy was told of and that were given to somebody else since."""
        return sum(len(tenancy.lost) for tenancy in self.rows.values())

    def open(self, tenancy: Tenancy) -> None:
        """A request moves into a row, which must be empty."""
        if tenancy.row in self.rows:
            raise IntegrityError(f"row {tenancy.row} is given to {tenancy.rid} while {self.rows[tenancy.row]} is in it")
        self.rows[tenancy.row] = tenancy

    def launch(self, work: list[tuple[Segment, Tenancy]]) -> None:
        """Follow one microbatch: first every page table, then what it writes and reads."""
        fresh = [self._tell(segment, tenancy) for segment, tenancy in work]
        for (segment, tenancy), pages in zip(work, fresh, strict=True):
            for page in pages:
                self._give(page, tenancy)
            end = segment.start + len(segment.token_ids)
            if tenancy.lost and min(tenancy.lost) * self._size < end:
                index = min(tenancy.lost)
                raise IntegrityError(f"{tenancy} reads page {tenancy.pages[index]}, which was given to somebody else")
            if len(tenancy.pages) != -(-end // self._size):
                raise IntegrityError(f"{tenancy} needs {-(-end // self._size)} pages, its table is {tenancy.pages}")

    def land(self, segment: Segment, tenancy: Tenancy, *, confirmed: bool) -> None:
        """A segment came back. What it filled may be shared from now on if it is ``confirmed``."""
        tenancy.in_flight -= 1
        if confirmed:
            size = self._size
            for index in range(segment.start // size, (segment.start + len(segment.token_ids)) // size):
                self._content[tenancy.pages[index]] = self._hash_of(tenancy, index)
        if tenancy.leaving and not tenancy.in_flight:
            self.close(tenancy)

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
                self._forget_user(page, tenancy)

    def flush(self) -> None:
        """No page can be shared with a later request any more."""
        self._content.clear()

    def _tell(self, segment: Segment, tenancy: Tenancy) -> list[int]:
        """Bring a page table up to date; returns the pages that the tenancy gets to write in."""
        tenancy.in_flight += 1
        if not segment.pages:
            return []
        first, size = segment.page_start, self._size
        if first > len(tenancy.pages):
            raise IntegrityError(f"{tenancy} has {len(tenancy.pages)} pages and is told of the one at {first}")
        before, tenancy.pages[first:] = tenancy.pages[first:], segment.pages
        for index, page in enumerate(before, first):
            if index in tenancy.lost:
                tenancy.lost.discard(index)
            else:
                self._forget_user(page, tenancy)
        fresh = []
        for index, page in enumerate(segment.pages, first):
            users = self._users.setdefault(page, [])
            if tenancy in users:
                raise IntegrityError(f"{tenancy} has page {page} twice in its table {tenancy.pages}")
            users.append(tenancy)
            if index - first < len(before) and before[index - first] == page:
                continue
            if index >= segment.start // size:
                fresh.append(page)
            elif self._content.get(page) != self._hash_of(tenancy, index):
                raise IntegrityError(f"{tenancy} shares page {page} at index {index}, which does not hold its tokens")
        return fresh

    def _give(self, page: int, tenancy: Tenancy) -> None:
        """Whoever else was told of a page may not use it any more: it must be sent a new one before it goes on."""
        self._content.pop(page, None)
        for other in [user for user in self._users[page] if user is not tenancy]:
            if other.in_flight:
                raise IntegrityError(f"page {page} is given to {tenancy} while {other} uses it in flight")
            other.lost.add(other.pages.index(page))
            self._users[page].remove(other)

    def _forget_user(self, page: int, tenancy: Tenancy) -> None:
        users = self._users[page]
        users.remove(tenancy)
        if not users:
            del self._users[page]

    def _hash_of(self, tenancy: Tenancy, index: int) -> int:
        """The hash over a request's tokens up to the end of its page at ``index``."""
        chain, size = tenancy.chain, self._size
        while len(chain) <= index:
            start = len(chain) * size
            chain.append(hash((chain[-1] if chain else 0, *tenancy.ids[start : start + size])))
        return chain[index]
