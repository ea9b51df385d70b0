"""Snapshots of a scheduler for scripts, taken between two steps. An adapter adds its own fields.

They are copies: nothing in a snapshot changes as the scheduler goes on, unlike in ``t.scheduler``, the live object.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from scripted.core.errors import BadCall, UnknownName
from scripted.core.phrases import nearest
from scripted.script.values import Word

# The modes of all adapters; each engine has some of them.
MODES: Final = frozenset({"prefill", "decode", "mixed", "update", "lora", "profile", "sleep"})


def mode_of(mode: str) -> str:
    """Make a mode that only compares with ``MODES``."""
    return Word(mode, "a microbatch's mode", MODES)


class _Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of values that only compare with values of their own class, and refuse any other comparison."""

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return all(getattr(self, name) == getattr(other, name) for name in self.__struct_fields__)
        if other is None:
            return False
        fields = ", ".join(f".{name}" for name in self.__struct_fields__)
        raise BadCall(
            f"{type(self).__name__} is compared with {other!r}, which it can never equal; compare one of {fields}"
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(msgspec.structs.astuple(self))


class Snapshot(_Copy, frozen=True, kw_only=True):
    """Base class of values that are always present, and so refuse to be conditions."""

    def __bool__(self) -> bool:
        fields = ", ".join(f".{name}" for name in self.__struct_fields__)
        raise BadCall(f"{type(self).__name__} is always true, so asking it tests nothing; ask one of {fields}")


class MicrobatchInFlight(_Copy, frozen=True, kw_only=True):
    """A microbatch in flight. It computes ``tokens`` tokens and completes in step ``due_at_step`` or later.

    ``positions``: the positions that each request computes. ``pages``: the page table of each request. ``drafts`` of
    the tokens are drafts to verify. The requests in ``ahead`` were planned ahead: their input token was unknown at the
    launch. The microbatch copies ``written_pages`` pages to the host and ``loaded_pages`` pages back.
    """

    id: int
    mode: str
    rids: tuple[str, ...]
    tokens: int
    launched_at_step: int
    due_at_step: int
    drafts: int = 0
    written_pages: int = 0
    loaded_pages: int = 0
    ahead: tuple[str, ...] = ()
    positions: dict[str, tuple[int, ...]] = {}
    pages: dict[str, tuple[int, ...]] = {}


class Arrival(_Copy, frozen=True, kw_only=True):
    """A client's message that no step has seen yet: its kind, and the rid if it concerns one request."""

    kind: str
    rid: str | None = None

    def __str__(self) -> str:
        return self.kind if self.rid is None else f"{self.kind} {self.rid}"


class KVState(Snapshot, frozen=True, kw_only=True):
    """Counts of pages: free, cached in the prefix tree, held by requests or reserved; and the tokens per page.

    ``reserved`` of the ``held`` pages are withheld from requests by ``exhaust_kv`` or ``exhaust_window``.
    """

    total: int
    free: int
    cached: int
    held: int
    page_size: int
    reserved: int = 0


class RowState(Snapshot, frozen=True, kw_only=True):
    """Counts of rows; ``reserved`` are withheld from requests by ``exhaust_rows``."""

    total: int
    free: int
    reserved: int = 0


class State(Snapshot, frozen=True, kw_only=True):
    """A scheduler between two steps. Each of its ``counts`` is also an attribute, unless a field has that name.

    ``waiting`` and ``running`` hold rids, ``chunked`` the rid of the partly prefilled request. ``arrived`` holds
    messages that no step has seen yet: their requests come last in ``waiting``, and a scheduler with arrivals is not
    idle. ``paused`` is the mode of the pause, or None.
    """

    step: int
    now: float
    arrived: tuple[Arrival, ...]
    waiting: tuple[str, ...]
    chunked: str | None
    running: tuple[str, ...]
    in_flight: tuple[MicrobatchInFlight, ...]
    paused: str | None
    is_quiescent: bool
    is_fully_idle: bool
    kv: KVState
    rows: RowState
    counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self.counts:
            return self.counts[name]
        known = [*self.__struct_fields__, *self.counts]
        raise UnknownName(f"t.state has no {name!r}{nearest(name, known)}; it has {', '.join(known)}")

    @property
    def queues_clear(self) -> bool:
        """True when no request waits, is partly prefilled or runs; microbatches may still be in flight."""
        return not self.waiting and self.chunked is None and not self.running

    def __str__(self) -> str:
        flights = ", ".join(
            f"#{m.id} {m.mode} of {' '.join(m.rids)}, due at step {m.due_at_step}" for m in self.in_flight
        )
        return (
            f"step {self.step}: waiting={list(self.waiting)} chunked={self.chunked} running={list(self.running)} "
            + (f"not yet seen: {', '.join(map(str, self.arrived))}; " if self.arrived else "")
            + f"in flight: {flights or 'nothing'}; "
            f"pages free={self.kv.free} cached={self.kv.cached} held={self.kv.held}; "
            f"rows free={self.rows.free}/{self.rows.total}" + (f"; paused ({self.paused})" if self.paused else "")
        )
