"""The state of the engine as scripts see it: the snapshot of any scheduler, and fields of this engine only."""

from __future__ import annotations

import re
from typing import Any, Final, get_args

from engine.core.memory import PagePool
from engine.core.messages import ClientMessage, Generate, PauseMode
from engine.core.plan import Microbatch
from engine.core.scheduler import Scheduler
from scripted.script.state import Arrival, KVState, MicrobatchInFlight, RowState, Snapshot, State, mode_of
from scripted.script.values import Listed, OneRid, Word

_KEBAB: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
PAUSES: Final = frozenset(mode.value for mode in PauseMode)


def _kind_of(message: type) -> str:
    return "start" if message is Generate else _KEBAB.sub("-", message.__name__).lower()


_KINDS: Final = frozenset(map(_kind_of, get_args(ClientMessage)))


class TreeState(Snapshot, frozen=True, kw_only=True):
    """Counts of the prefix tree's nodes."""

    nodes: int
    locked_nodes: int


class LoadState(Snapshot, frozen=True, kw_only=True):
    """The load that a router sees: requests, tokens still to be prefilled, and pages.

    ``running`` requests are in the engine but not in the queue. Cached tokens are not pending.
    """

    running: int
    waiting: int
    pending_prefill_tokens: int
    free_pages: int
    total_pages: int


class EngineState(State, frozen=True, kw_only=True):
    """The engine between two steps.

    ``digest`` covers everything since the script began; ``plan_digest`` leaves out token values and is the same in both
    tiers. ``window`` counts the pages of the window pool, None for a model without window layers.
    ``waiting_for_grammar`` are the ``waiting`` requests whose grammar is not ready. ``host`` counts the pages of the
    host tier, None without one: ``cached`` pages can be hit, ``held`` ones are not copied yet. ``transferring``
    requests receive the KV of their prompt from another engine, or deliver the last part of it to one.
    """

    tree: TreeState
    window: KVState | None
    digest: str
    plan_digest: str
    load: LoadState
    waiting_for_grammar: tuple[str, ...] = ()
    transferring: tuple[str, ...] = ()
    host: KVState | None = None


def take_state(run: Any) -> EngineState:
    """Take a snapshot of an engine with its arrivals."""
    scheduler, due_steps = run.scheduler, run.results.due_steps()
    books, pages, rows = scheduler.books, scheduler.memory.pages, scheduler.memory.rows
    window, host = scheduler.memory.sliding_window, scheduler.memory.host
    return EngineState(
        waiting_for_grammar=Listed(
            one.rid for one in books.waiting if scheduler.features.grammars.is_waited_for_by(one)
        ),
        transferring=Listed(books.transferring),
        step=scheduler.step_number,
        now=scheduler.now,
        arrived=Listed(_arrival_of(message) for message in run.arrived),
        waiting=Listed([request.rid for request in books.waiting] + [r.rid for r in run.arrived_requests]),
        chunked=None if books.chunked is None else OneRid(books.chunked.rid),
        running=Listed(books.running),
        in_flight=Listed(
            _in_flight(
                launched.microbatch,
                launched.step,
                due_steps.get(launched.microbatch.id, launched.step + scheduler.limits.depth),
            )
            for launched in books.in_flight
        ),
        paused=None if books.paused is None else Word(books.paused.value, "a pause's mode", PAUSES),
        is_quiescent=books.is_quiescent and not run.has_unseen,
        is_fully_idle=books.is_fully_idle and not run.has_unseen,
        kv=_kv_state(pages),
        rows=RowState(total=rows.total, free=rows.free, reserved=rows.reserved),
        window=None if window is None else _kv_state(window.pages),
        host=None if host is None else _kv_state(host.pages),
        tree=_tree_state([node.lock_ref for node in scheduler.memory.tree.nodes()]),
        digest=scheduler.digests.digest,
        plan_digest=scheduler.digests.plan_digest,
        load=_load_state(run),
    )


def _in_flight(microbatch: Microbatch, launched_at_step: int, due_at_step: int) -> MicrobatchInFlight:
    copies = microbatch.copies
    return MicrobatchInFlight(
        id=microbatch.id,
        mode=mode_of(microbatch.mode),
        rids=Listed(microbatch.rids),
        tokens=microbatch.tokens,
        launched_at_step=launched_at_step,
        drafts=sum(microbatch.drafts),
        written_pages=0 if copies is None else len(copies.out),
        loaded_pages=0 if copies is None else len(copies.into),
        ahead=Listed(segment.rid for segment in microbatch.segments if segment.is_ahead),
        due_at_step=due_at_step,
    )


def _load_state(run: Any) -> LoadState:
    """Return the scheduler's own numbers plus the arrivals."""
    scheduler, arrived = run.scheduler, run.arrived_requests
    stats = scheduler.stats()
    return LoadState(
        running=stats.alive - stats.waiting,
        waiting=stats.waiting + len(arrived),
        pending_prefill_tokens=stats.pending_prefill_tokens
        + sum(len(one.prompt_ids) - _cached_tokens(scheduler, one) for one in arrived),
        free_pages=stats.pages_free,
        total_pages=stats.pages_total,
    )


def _cached_tokens(scheduler: Scheduler, message: Generate) -> int:
    """Count the tokens of an arrived prompt that it would hit, which excludes tokens whose logits it needs."""
    first = message.prompt_logprobs_from
    return scheduler.memory.cached_tokens(message.prompt_ids, None if first < 0 else first)


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
    kind = Word(_kind_of(type(message)), "a message's kind", _KINDS)
    return Arrival(kind=kind, rid=getattr(message, "rid", None))


def _tree_state(locks: list[int]) -> TreeState:
    return TreeState(nodes=len(locks), locked_nodes=sum(1 for lock_ref in locks if lock_ref))
