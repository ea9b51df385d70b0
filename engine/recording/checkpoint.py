"""Checkpoints: the whole state of a scheduler that is fully idle, as plain data, and a scheduler restored from it.

Only then is it little: no request, no lease, nothing in flight. The digest chains begin anew after a checkpoint.
"""

from __future__ import annotations

import msgspec

from engine.errors import IntegrityError
from engine.integrity import audit
from engine.limits import Limits
from engine.messages import EngineStats, Grammar, PauseMode
from engine.recording.snapshot import (
    KeptPage,
    TreeSnapshot,
    host_snapshot,
    restore_host,
    restore_tree,
    tree_snapshot,
    window_snapshot,
)
from engine.scheduler.counters import Counters
from engine.scheduler.lora import Lora
from engine.scheduler.scheduler import Scheduler


class LoraState(msgspec.Struct, frozen=True, array_like=True):
    name: str
    path: str
    version: int
    used: int


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="checkpoint"):
    """A scheduler after step ``stats.step``; ``now`` in seconds. Rows and pages that the tree has not are free.

    ``window`` has the pages of the tree with a window page, each with it, in the order of eviction. ``grammars`` are
    those that are kept, with their ids, and whether they are compiled; no later one has an id up to ``last_grammar``.
    ``host`` are the pages of the second tier.
    """

    now: float
    stats: EngineStats
    tree: TreeSnapshot
    window: tuple[tuple[int, int], ...] = ()
    last_grammar: int = 0
    grammars: tuple[tuple[int, Grammar, bool], ...] = ()
    loras: tuple[LoraState, ...] = ()
    host: tuple[KeptPage, ...] = ()


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
    )


def restored(limits: Limits, checkpoint: Checkpoint) -> Scheduler:
    """A scheduler that goes on from a checkpoint. Raises IntegrityError for one that does not balance."""
    scheduler, stats = Scheduler(limits), checkpoint.stats
    scheduler.step_number, scheduler.now = stats.step, checkpoint.now
    scheduler.books.paused = None if stats.paused is None else PauseMode(stats.paused)
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
