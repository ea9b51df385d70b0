"""What a script sees of the engine: a frozen snapshot, taken between two steps.

Copies only; nothing in a snapshot changes when the engine goes on. The live scheduler is another thing
(``t.scheduler``).
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from engine.memory import PagePool
from engine.messages import ClientMessage, Generate, PauseMode
from engine.plan import ForwardMode
from scripted.errors import BadCall
from scripted.rig.rig import Rig
from scripted.rig.values import Listed, Word

__all__ = [
    "MODES",
    "Arrival",
    "KVState",
    "LoadState",
    "MicrobatchInFlight",
    "RowState",
    "State",
    "TreeState",
    "mode_of",
    "take_state",
]

MODES: Final = frozenset(mode.value for mode in ForwardMode)
_KEBAB: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
PAUSES: Final = frozenset(mode.value for mode in PauseMode)


def mode_of(mode: ForwardMode) -> str:
    """A mode that can only be compared with one of ``MODES``."""
    return Word(mode.value, "a microbatch's mode", MODES)


class _Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is equal to others of its kind only, and refuses to be compared with anything else."""

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return all(getattr(self, name) == getattr(other, name) for name in self.__struct_fields__)
        if other is None:
            return False
        fields = ", ".join(f".{name}" for name in self.__struct_fields__)
        raise BadCall(
            f"{type(self).__name__} is compared with {other!r}, which it can never be; compare one of {fields}"
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(msgspec.structs.astuple(self))


class _Snapshot(_Copy, frozen=True, kw_only=True):
    """Base of what is always there, and so says nothing as a condition."""

    def __bool__(self) -> bool:
        fields = ", ".join(f".{name}" for name in self.__struct_fields__)
        raise BadCall(f"{type(self).__name__} is always true, so asking it tests nothing; ask one of {fields}")


class MicrobatchInFlight(_Copy, frozen=True, kw_only=True):
    """A microbatch in flight. It computes ``tokens`` tokens and completes in step ``due_at_step`` or later.

    ``drafts`` of the tokens are guesses that it verifies. The requests of ``ahead`` were planned ahead: the token that
    it computes for them was not known when it was launched. It copies ``written_pages`` pages to the host, and
    ``loaded_pages`` pages from it.
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


class Arrival(_Copy, frozen=True, kw_only=True):
    """A client's message that no step has seen: its kind, and its rid if it is about one request."""

    kind: str
    rid: str | None = None


class KVState(_Snapshot, frozen=True, kw_only=True):
    """Counts of pages: free, cached in the prefix tree, held by requests or kept from them; and tokens in a page.

    ``reserved`` of the ``held`` pages are kept from requests by ``exhaust_kv``, or by ``exhaust_window``.
    """

    total: int
    free: int
    cached: int
    held: int
    page_size: int
    reserved: int = 0


class RowState(_Snapshot, frozen=True, kw_only=True):
    """Counts of rows; ``reserved`` are kept from requests by ``exhaust_rows``."""

    total: int
    free: int
    reserved: int = 0


class TreeState(_Snapshot, frozen=True, kw_only=True):
    """Counts of the prefix tree's nodes."""

    nodes: int
    locked_nodes: int


class LoadState(_Snapshot, frozen=True, kw_only=True):
    """What a router would be told of the engine: requests, tokens that are still to be prefilled, and pages.

    ``running`` requests are in the engine and not in the queue. What is cached now is not pending.
    """

    running: int
    waiting: int
    pending_prefill_tokens: int
    free_pages: int
    total_pages: int


class State(_Snapshot, frozen=True, kw_only=True):
    """The engine between two steps.

    ``waiting`` and ``running`` hold rids, ``chunked`` the rid of the partly prefilled request. ``arrived`` is what no
    step has seen yet: its requests are the last ones in ``waiting``, and nothing is idle while it is there. ``digest``
    stands for all that happened since the script began; ``plan_digest`` leaves out token values and is the same in
    both tiers. ``window`` counts the pages of the window pool, None for a model without window layers. Of ``waiting``,
    ``waiting_for_grammar`` have a grammar that is not ready. ``host`` counts the pages of the second tier, None without
    one: those that are ``cached`` can be hit, those that are ``held`` are still to be copied there.
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
    tree: TreeState
    window: KVState | None
    digest: str
    plan_digest: str
    load: LoadState
    waiting_for_grammar: tuple[str, ...] = ()
    host: KVState | None = None

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
            + (f"not yet seen: {', '.join(map(_arrival_text, self.arrived))}; " if self.arrived else "")
            + f"in flight: {flights or 'nothing'}; "
            f"pages free={self.kv.free} cached={self.kv.cached} held={self.kv.held}; "
            f"rows free={self.rows.free}/{self.rows.total}" + (f"; paused ({self.paused})" if self.paused else "")
        )


def take_state(rig: Rig) -> State:
    """Snapshot an engine, with what has arrived for it."""
    scheduler, due_steps = rig.scheduler, rig.results.due_steps()
    books, pages, rows = scheduler.books, scheduler.memory.pages, scheduler.memory.rows
    window, host = scheduler.memory.sliding_window, scheduler.memory.host
    return State(
        waiting_for_grammar=Listed(
            one.rid for one in books.waiting if one.grammar is not None and not one.grammar.is_ready
        ),
        step=scheduler.step_number,
        now=scheduler.now,
        arrived=Listed(_arrival_of(message) for message in rig.arrived),
        waiting=Listed([request.rid for request in books.waiting] + [r.rid for r in rig.arrived_requests]),
        chunked=books.chunked.rid if books.chunked is not None else None,
        running=Listed(books.running),
        in_flight=Listed(
            MicrobatchInFlight(
                id=launched.microbatch.id,
                mode=mode_of(launched.microbatch.mode),
                rids=Listed(launched.microbatch.rids),
                tokens=launched.microbatch.tokens,
                launched_at_step=launched.step,
                drafts=sum(launched.microbatch.drafts),
                written_pages=0 if launched.microbatch.copies is None else len(launched.microbatch.copies.out),
                loaded_pages=0 if launched.microbatch.copies is None else len(launched.microbatch.copies.into),
                ahead=Listed(segment.rid for segment in launched.microbatch.segments if segment.is_ahead),
                due_at_step=due_steps.get(launched.microbatch.id, launched.step + scheduler.limits.depth),
            )
            for launched in books.in_flight
        ),
        paused=None if books.paused is None else Word(books.paused.value, "a pause's mode", PAUSES),
        is_quiescent=books.is_quiescent and not rig.has_unseen,
        is_fully_idle=books.is_fully_idle and not rig.has_unseen,
        kv=_kv_state(pages),
        rows=RowState(total=rows.total, free=rows.free, reserved=rows.reserved),
        window=None if window is None else _kv_state(window.pages),
        host=None if host is None else _kv_state(host.pages),
        tree=_tree_state([node.lock_ref for node in scheduler.memory.tree.nodes()]),
        digest=scheduler.digests.digest,
        plan_digest=scheduler.digests.plan_digest,
        load=_load_state(rig),
    )


def _load_state(rig: Rig) -> LoadState:
    """The scheduler's own numbers, and what has arrived."""
    scheduler, arrived = rig.scheduler, rig.arrived_requests
    stats, cached = scheduler.stats(), scheduler.memory.cached_tokens
    return LoadState(
        running=stats.alive - stats.waiting,
        waiting=stats.waiting + len(arrived),
        pending_prefill_tokens=stats.pending_prefill_tokens
        + sum(len(one.prompt_ids) - cached(one.prompt_ids, one.prompt_logprobs_from) for one in arrived),
        free_pages=stats.pages_free,
        total_pages=stats.pages_total,
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


def _arrival_of(message: ClientMessage) -> Arrival:
    kind = "start" if isinstance(message, Generate) else _KEBAB.sub("-", type(message).__name__).lower()
    return Arrival(kind=kind, rid=getattr(message, "rid", None))


def _arrival_text(arrival: Arrival) -> str:
    return arrival.kind if arrival.rid is None else f"{arrival.kind} {arrival.rid}"


def _tree_state(locks: list[int]) -> TreeState:
    return TreeState(nodes=len(locks), locked_nodes=sum(1 for lock_ref in locks if lock_ref))
