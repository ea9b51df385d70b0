"""The extra events that may happen to a workload at any step: every kind, at every target that it has."""

from __future__ import annotations

from typing import Final

from engine.messages import PauseMode
from scripted.actions import (
    AbortEverything,
    AbortRequest,
    Action,
    DisconnectClient,
    Evict,
    FailStage,
    Flush,
    HoldResults,
    KillStage,
    Pause,
    Press,
    Resume,
    StartRequest,
    Update,
)
from scripted.explore.schedule import Schedule, limits_of

__all__ = ["extras_of"]

EXTRA_RID: Final = "extra"
PRESSURE_RID: Final = "pressure"
# Other prompts of a workload have small seeds; what presses on the pool shares no prefix with them.
_PRESSURE_SEED: Final = 97
_DEFERRED_S: Final = 1.0
_LEFT_PAGES: Final = 1
# Events aim at so many requests of a workload; where it has more, the others are many of one kind.
_TARGETS_LIMIT: Final = 4


def extras_of(base: Schedule) -> tuple[Action, ...]:
    """Everything that can be added to a workload, in a fixed order."""
    starts = [placed.action for placed in base.placed if isinstance(placed.action, StartRequest)]
    starts = starts[:_TARGETS_LIMIT]
    rids = dict.fromkeys(start.rid for start in starts)
    modes = [Pause(mode=mode) for mode in PauseMode]
    anything: list[Action] = [Flush(), Flush(timeout_s=_DEFERRED_S), AbortEverything(), *modes, HoldResults()]
    anything += [FailStage(), KillStage(), Update(), Update(timeout_s=_DEFERRED_S)]
    anything += [Press(pages=_LEFT_PAGES), Press(rows=0), Press(unlocked=0), Evict()]
    anything += [AbortRequest(rid=rid) for rid in rids]
    anything += [DisconnectClient(rid=rid) for rid in rids]
    anything += [*_starts(base, starts), _pressure(base)]
    if any(isinstance(placed.action, Pause) for placed in base.placed):
        anything.append(Resume())
    return tuple(anything)


def _starts(base: Schedule, starts: list[StartRequest]) -> list[Action]:
    """A twin of each prompt, more urgent where that matters; and a rid that is taken."""
    priority = max((start.priority for start in starts), default=0) + 1 if base.config.priority_preemption else 0
    prompts = dict.fromkeys((start.prompt, start.seed) for start in starts)
    twins: list[Action] = [
        StartRequest(rid=EXTRA_RID, prompt=prompt, seed=seed, priority=priority) for prompt, seed in prompts
    ]
    again: list[Action] = (
        [StartRequest(rid=starts[0].rid, prompt=starts[0].prompt, seed=starts[0].seed)] if starts else []
    )
    return twins + again


def _pressure(base: Schedule) -> Action:
    """A request that takes half of all pages."""
    limits = limits_of(base.config)
    tokens = min(limits.total_pages * limits.page_size // 2, limits.context_length - 2)
    if not limits.chunking:
        tokens = min(tokens, limits.prefill_budget_tokens)
    return StartRequest(rid=PRESSURE_RID, prompt=max(1, tokens), seed=_PRESSURE_SEED, new=3)
