"""The base classes of this engine's actions, and their list: every subclass with a tag.

Nothing else in the harness lists actions: schedules, the search, scripts, recordings, the shell and reports query the
classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from engine.core.messages import ClientMessage, Generate, Grammar, OperatorEvent
from scripted.core.action import Action, Culprit, RunLike
from scripted.core.prompts import Recipe
from scripted.sdk import action_bases

_classes: list[type[Action]] = []


class EventReader(Protocol):
    """Names and prompts that a schedule can express, for reading an action back from a recorded event."""

    def name_of(self, rid: str) -> str:
        """Return the schedule's name for the request of this rid."""
        ...

    def new_tokens_of(self, message: Generate) -> int:
        """Return the final number of tokens of a request."""
        ...

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        """Return the recipe of a prompt that shares as much with earlier prompts as this one does."""
        ...

    def regex_of(self, grammar: Grammar) -> str:
        """Return the regex that replaces a grammar in a schedule, in which the length of an output decides its end."""
        ...


def register(*kinds: type[Action]) -> None:
    """Add these actions to the list, at this place."""
    _classes.extend(kinds)


class EngineAction(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the actions of this engine only. ``run.machine`` has the scheduler and its limits."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(cls)

    def reaches(self, run: RunLike) -> bool:
        """Return whether the action can have an effect: its request is live, or the engine has not failed."""
        by_itself = self.needs_open or self.target_rid is not None
        return super().reaches(run) if by_itself else run.machine.scheduler.failure is None


class EngineCall(EngineAction, action_bases.AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True):
    """A call with a body, which the server's front end turns into its message."""

    @property
    def body(self) -> Mapping[str, object] | None:
        return None

    def is_sent_as(self, message: ClientMessage) -> bool:
        """Return whether a message is this call, apart from its id."""
        call_id = getattr(message, "call_id", None)
        return call_id is not None and message == self.message(call_id)


class Intervention(EngineAction, frozen=True, kw_only=True, omit_defaults=True):
    """An action of an operator at the gate, which takes effect at once, between two steps."""

    event: ClassVar[Any]
    is_control: ClassVar[bool] = True
    caused_by: ClassVar[Culprit] = Culprit.OPERATOR

    def operator_event(self) -> OperatorEvent:
        """Return the action's event, with the same fields."""
        event: OperatorEvent = self.event(**msgspec.structs.asdict(self))
        return event

    def apply(self, run: RunLike) -> None:
        event = self.operator_event()
        run.happened(event)
        run.machine.intervene(event)


def all_actions() -> tuple[type[Action], ...]:
    """Return every concrete action, in the order in which a search tries them."""
    return tuple(sorted((cls for cls in _classes if cls.__struct_config__.tag), key=lambda cls: cls.search_turn))
