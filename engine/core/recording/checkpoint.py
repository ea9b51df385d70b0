"""Checkpoints: the whole state of a scheduler that is fully idle, as plain data, and a scheduler restored from it.

Only then is it little: no request, no lease, nothing in flight. The digest chains begin again after a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.core.audit import audit
from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory import PLAIN, HostPage, HostTier, KvKey, KVMemory, Node, SlidingWindowPool
from engine.core.messages import Grammar, PauseMode
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.request import Lora
from engine.core.scheduler.scheduler import Scheduler
from engine.core.stats import EngineStats


class LoraState(msgspec.Struct, frozen=True, array_like=True):
    name: str
    path: str
    version: int
    used: int


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="checkpoint"):
    """A scheduler after step ``stats.step``; ``now`` in seconds. Rows and pages that the tree has not are free.

    ``window`` has the pages of the tree with a window page, each with it, in the order of eviction. ``grammars`` are
    those that are kept, with their ids, and whether they are compiled; no later one has an id up to ``last_grammar``.
    ``host`` are the pages of the second tier. ``weights`` is what ``Books.weights`` is, ``transfers`` how many began.
    """

    now: float
    stats: EngineStats
    tree: TreeSnapshot
    window: tuple[tuple[int, int], ...] = ()
    last_grammar: int = 0
    grammars: tuple[tuple[int, Grammar, bool], ...] = ()
    loras: tuple[LoraState, ...] = ()
    host: tuple[KeptPage, ...] = ()
    weights: str = ""
    transfers: int = 0


def checkpoint_of(scheduler: Scheduler) -> Checkpoint | None:
    """The scheduler as it is between two steps; None while it is busy or broken, or a call of it is unanswered.

    That is a call that waits, a profile that is being taken, or memory that an operator keeps back.
    """
    idle = scheduler.is_fully_idle and scheduler.controls.is_at_rest
    if not idle or scheduler.failure is not None or scheduler.pressure.is_on:
        return None
    memory = scheduler.memory
    window = window_snapshot(memory.sliding_window) if memory.sliding_window is not None else ()
    known = scheduler.loras.known.values()
    loras = tuple([LoraState(one.name, one.path, one.version, one.used) for one in known])
    last_grammar, grammars = scheduler.grammars.snapshot()
    return Checkpoint(
        now=scheduler.now,
        stats=scheduler.stats(),
        tree=tree_snapshot(memory),
        window=window,
        last_grammar=last_grammar,
        grammars=grammars,
        loras=loras,
        host=() if memory.host is None else host_snapshot(memory.host),
        weights=scheduler.books.weights,
        transfers=scheduler.transfers.begun,
    )


def restored(limits: Limits, checkpoint: Checkpoint) -> Scheduler:
    """A scheduler that goes on from a checkpoint. Raises IntegrityError for one that does not balance."""
    scheduler, stats = Scheduler(limits), checkpoint.stats
    scheduler.step_number, scheduler.now = stats.step, checkpoint.now
    scheduler.books.paused = None if stats.paused is None else PauseMode(stats.paused)
    scheduler.books.weights, scheduler.transfers.begun = checkpoint.weights, checkpoint.transfers
    for name in Counters.__slots__:
        setattr(scheduler.counters, name, getattr(stats, name))
    restore_tree(scheduler.memory, checkpoint.tree)
    scheduler.grammars.become(checkpoint.last_grammar, checkpoint.grammars)
    if scheduler.memory.sliding_window is not None:
        scheduler.memory.sliding_window.become(checkpoint.window)
    if scheduler.memory.host is not None:
        restore_host(scheduler.memory.host, checkpoint.host)
    scheduler.loras.known = {
        one.name: Lora(name=one.name, path=one.path, version=one.version, used=one.used) for one in checkpoint.loras
    }
    audit(scheduler)
    if scheduler.stats() != stats:
        raise IntegrityError(f"a checkpoint of {stats} makes a scheduler of {scheduler.stats()}: it is damaged")
    return scheduler


class CachedRun(msgspec.Struct, frozen=True, array_like=True):
    """One node: ``tokens`` are the ids of its own pages, ``parent`` is the id of the node that they continue."""

    id: int
    parent: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    hit_count: int
    last_used: int
    kv_key: KvKey = PLAIN


class TreeSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``runs`` are all nodes but the root, parents before children, siblings in order of insertion."""

    root: int
    generation: int
    next_id: int
    tick: int
    runs: tuple[CachedRun, ...]


def tree_snapshot(memory: KVMemory) -> TreeSnapshot:
    """What the tree is; locks are not in it. Tokens are shared, not copied."""
    tree, runs = memory.tree, []
    for node in tree.nodes():
        assert node.parent is not None
        place = node.id, node.parent.id
        runs.append(CachedRun(*place, node.tokens, tuple(node.pages), node.hit_count, node.last_used, node.kv_key))
    return TreeSnapshot(
        root=tree.root.id, generation=tree.generation, next_id=tree.next_id, tick=tree.tick, runs=tuple(runs)
    )


def restore_tree(memory: KVMemory, snapshot: TreeSnapshot) -> None:
    """Make the tree of an empty memory what a snapshot says, without locks. Raises IntegrityError for a damaged one."""
    assert not memory.pages.cached, f"a tree with pages of {memory.pages} cannot become another one"
    root = Node(snapshot.root, snapshot.generation, (), [], None)
    nodes = {root.id: root}
    for run in snapshot.runs:
        if run.parent not in nodes:
            raise IntegrityError(f"node {run.id} continues node {run.parent}, which a snapshot must name before it")
        memory.pages.hold(run.pages)
        memory.pages.cache(run.pages)
        parent = nodes[run.parent]
        node = nodes[run.id] = Node(run.id, snapshot.generation, run.tokens, list(run.pages), parent, kv_key=run.kv_key)
        parent.children[node.key(memory.pages.page_size)] = node
        node.hit_count, node.last_used = run.hit_count, run.last_used
    memory.tree.become(root, [*nodes.values()][1:], next_id=snapshot.next_id, tick=snapshot.tick)


def window_snapshot(window: SlidingWindowPool) -> tuple[tuple[int, int], ...]:
    """Every page with a window page, and that, in the order of eviction; only while no lease uses one."""
    return tuple([(page, window.beside[page]) for page in window.idle])


class KeptPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of the second tier; with a ``source`` it is still to be copied from that page."""

    number: int
    key: bytes
    source: int | None


def host_snapshot(host: HostTier) -> tuple[KeptPage, ...]:
    """Every page in use, least recently used first; only while no copy is in flight."""
    return tuple([KeptPage(page.number, page.key, page.source) for page in host.kept.values()])


def restore_host(host: HostTier, pages: Sequence[KeptPage]) -> None:
    """Make an empty second tier what a snapshot says."""
    host.become([HostPage(one.number, one.key, one.source, is_ready=one.source is None) for one in pages])
