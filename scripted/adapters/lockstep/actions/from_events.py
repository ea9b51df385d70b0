"""From an event of the engine to its action: what a report calls it."""

from __future__ import annotations

from engine.messages import Event
from scripted.adapters.lockstep.actions.action import all_actions
from scripted.core.action import Action


def words_of(event: Event) -> str | None:
    """A report's phrase for an event that an action makes; None for any other."""
    return next((action.words(event) for action in _actions_of(event)), None)


def name_in_answers(event: Event) -> str | None:
    """What the answer to an event is called in reports; None for an event that no action makes."""
    return next((action.name_in_answers(event) for action in _actions_of(event)), None)


def _actions_of(event: Event) -> list[type[Action]]:
    return [action for action in all_actions() if action.event is type(event)]
