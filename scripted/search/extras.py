"""The extra events that may happen to a workload at any step: what each kind of action says can be added to it."""

from __future__ import annotations

from typing import Final

from scripted.core.action import Action, SearchBase
from scripted.core.schedule import Schedule

# Events aim at no more requests of a workload than this; the others of a larger one are alike.
_TARGETS_LIMIT: Final = 4


def extras_of(schedule: Schedule) -> tuple[Action, ...]:
    """Everything that can be added to a workload, in a fixed order."""
    actions = [placed.action for placed in schedule.placed]
    starts = [action for action in actions if action.is_start]
    adapter = schedule.adapter
    base = SearchBase(
        schedule.config,
        adapter.limits_of(schedule.config),
        starts=tuple(starts[:_TARGETS_LIMIT]),
        kinds=frozenset(map(type, actions)),
    )
    return tuple(extra for action in adapter.actions for extra in action.extras(base))
