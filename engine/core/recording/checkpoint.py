"""Checkpoints: the state of a scheduler that is fully idle, and a scheduler restored from it.

An idle state is small: no request, no lease, nothing in flight. The digest chains begin again after a checkpoint.
"""

from __future__ import annotations

from engine.core.audit import audit
from engine.core.checkpoint import CachedRun, Checkpoint, CheckpointParts, TreeSnapshot
from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory import KVMemory, Node
from engine.core.messages import PauseMode
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.scheduler import Scheduler


def checkpoint_of(scheduler: Scheduler) -> Checkpoint | None:
    """Return the checkpoint of an idle scheduler; None while it is busy or has failed, or a call is unanswered.

    Waiting calls, running profiles and withheld memory prevent a checkpoint too.
    """
    idle = scheduler.is_fully_idle and scheduler.is_at_rest
    if not idle or scheduler.failure is not None or scheduler.pressure.is_on:
        return None
    parts: CheckpointParts = {}
    for feature in scheduler.features:
        feature.snapshot(parts)
    return Checkpoint(now=scheduler.now, stats=scheduler.stats(), tree=tree_snapshot(scheduler.memory), **parts)


def restored(limits: Limits, checkpoint: Checkpoint) -> Scheduler:
    """Return a scheduler that continues from a checkpoint. Raises IntegrityError for an inconsistent one."""
    scheduler, stats = Scheduler(limits), checkpoint.stats
    scheduler.step_number, scheduler.now = stats.step, checkpoint.now
    scheduler.books.paused = None if stats.paused is None else PauseMode(stats.paused)
    for name in Counters.__slots__:
        setattr(scheduler.counters, name, getattr(stats, name))
    restore_tree(scheduler.memory, checkpoint.tree)
    for feature in scheduler.features:
        feature.restore(checkpoint)
    audit(scheduler)
    if scheduler.stats() != stats:
        raise IntegrityError(f"a checkpoint of {stats} restores to {scheduler.stats()}: it is damaged")
    return scheduler


def tree_snapshot(memory: KVMemory) -> TreeSnapshot:
    """Return the tree without its locks. Tokens are shared, not copied."""
    tree, runs = memory.tree, []
    for node in tree.nodes():
        assert node.parent is not None
        place = node.id, node.parent.id
        runs.append(CachedRun(*place, node.tokens, tuple(node.pages), node.hit_count, node.last_used, node.kv_key))
    return TreeSnapshot(
        root=tree.root.id, generation=tree.generation, next_id=tree.next_id, tick=tree.tick, runs=tuple(runs)
    )


def restore_tree(memory: KVMemory, snapshot: TreeSnapshot) -> None:
    """Restore a snapshot into the tree of an empty memory, without locks. Raises IntegrityError for a damaged one."""
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
