"""What a script sees of the engine: a frozen snapshot, taken between two steps.

Copies only; nothing in a snapshot changes when the engine goes on. The live scheduler is another thing
(``t.scheduler``).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.memory import PagePool
from engine.plan import ForwardMode
from engine.scheduler import Scheduler

__all__ = ["KVState", "Microbatch", "RowState", "State", "TreeState", "take_state"]


class Microbatch(msgspec.Struct, frozen=True, kw_only=True):
    """A microbatch in flight. It computes ``tokens`` tokens and completes in step ``due_at_step`` or later."""

    id: int
    mode: ForwardMode
    rids: tuple[str, ...]
    tokens: int
    launched_at_step: int
    due_at_step: int


class KVState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of pages: free, cached in the prefix tree, held by requests or kept from them; and tokens in a page.

    ``reserved`` of the ``held`` pages are kept from requests by ``exhaust_kv``.
    """

    total: int
    free: int
    cached: int
    held: int
    page_size: int
    reserved: int = 0


class RowState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rows; ``reserved`` are kept from requests by ``exhaust_rows``."""

    total: int
    free: int
    reserved: int = 0


class TreeState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the prefix tree's nodes."""

    nodes: int
    locked_nodes: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The engine between two steps.

    ``waiting`` and ``running`` hold rids, ``chunked`` the rid of the partly prefilled request. ``digest`` stands for
    all that happened since the script began; ``plan_digest`` leaves out token values and is the same in both tiers.
    """

    step: int
    now: float
    waiting: tuple[str, ...]
    chunked: str | None
    running: tuple[str, ...]
    in_flight: tuple[Microbatch, ...]
    paused: str | None
    is_quiescent: bool
    is_fully_idle: bool
    kv: KVState
    rows: RowState
    tree: TreeState
    digest: str
    plan_digest: str

    @property
    def queues_clear(self) -> bool:
        """Nothing waits, nothing is partly prefilled, nothing runs; microbatches may still be in flight."""
        return not self.waiting and self.chunked is None and not self.running

    def __str__(self) -> str:
        flights = ", ".join(
            f"#{m.id} {m.mode} of {' '.join(m.rids)}, due at step {m.due_at_step}" for m in self.in_flight
        )
        return (
            f"step {self.step}: waiting={list(self.waiting)} chunked={self.chunked} running={list(self.running)} "
            f"in flight: {flights or 'nothing'}; "
            f"pages free={self.kv.free} cached={self.kv.cached} held={self.kv.held}; "
            f"rows free={self.rows.free}/{self.rows.total}" + (f"; paused ({self.paused})" if self.paused else "")
        )


def take_state(scheduler: Scheduler, due_steps: Mapping[int, int]) -> State:
    """Snapshot a scheduler; ``due_steps`` says in which step each microbatch in flight is due, by its id."""
    books, pages, rows = scheduler.books, scheduler.memory.pages, scheduler.memory.rows
    return State(
        step=scheduler.step_number,
        now=scheduler.now,
        waiting=tuple(request.rid for request in books.waiting),
        chunked=books.chunked.rid if books.chunked is not None else None,
        running=tuple(books.running),
        in_flight=tuple(
            Microbatch(
                id=launched.microbatch.id,
                mode=launched.microbatch.mode,
                rids=launched.microbatch.rids,
                tokens=launched.microbatch.tokens,
                launched_at_step=launched.step,
                due_at_step=due_steps.get(launched.microbatch.id, launched.step + scheduler.limits.depth),
            )
            for launched in books.in_flight
        ),
        paused=books.paused,
        is_quiescent=books.is_quiescent,
        is_fully_idle=books.is_fully_idle,
        kv=_kv_state(pages),
        rows=RowState(total=rows.total, free=rows.free, reserved=rows.reserved),
        tree=_tree_state(scheduler),
        digest=scheduler.digests.digest,
        plan_digest=scheduler.digests.plan_digest,
    )


def _kv_state(pages: PagePool) -> KVState:
    return KVState(
        total=pages.total,
        free=pages.free,
        cached=pages.cached,
        held=pages.held + pages.reserved,
        page_size=pages.page_size,
        reserved=pages.reserved,
    )


def _tree_state(scheduler: Scheduler) -> TreeState:
    locks = [node.lock_ref for node in scheduler.memory.tree.nodes()]
    return TreeState(nodes=len(locks), locked_nodes=sum(1 for lock_ref in locks if lock_ref))
