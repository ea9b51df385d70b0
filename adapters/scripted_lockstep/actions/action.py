"""The actions of this engine: their common bases, and all of them. Every subclass with a tag is known.

Nothing else in the harness lists actions: a schedule's text, the search, scripts, recordings, the shell and reports
ask the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from engine.core.messages import ClientMessage, Generate, Grammar, OperatorEvent
from scripted.core.action import Action, RunLike
from scripted.core.prompts import Recipe
from scripted.sdk import action_bases

_classes: list[type[Action]] = []


class EventReader(Protocol):
    """What reading an action back from a recorded event needs: names and prompts that a schedule can express."""

    def name_of(self, rid: str) -> str:
        """What the request of this rid is called here."""
        ...

    def new_name_of(self, rid: str) -> str: ...

    def new_tokens_of(self, message: Generate) -> int:
        """How many tokens a request that begins is to have in the end."""
        ...

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        """How a schedule makes a prompt that shares with those before it what this one does."""
        ...

    def regex_of(self, grammar: Grammar) -> str:
        """What stands for a grammar in a schedule, where the length of an output says when it is complete."""
        ...


def take_in(*kinds: type[Action]) -> None:
    """Know these from here on, in this order among the others."""
    _classes.extend(kinds)


class EngineAction(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what only this engine knows. ``run.machine`` has the scheduler and its limits."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        take_in(cls)

    def reaches(self, run: RunLike) -> bool:
        """Whether there is something for it to act on: a request that is alive, or an engine that has not failed."""
        by_itself = self.needs_open or self.target_rid is not None
        return super().reaches(run) if by_itself else run.machine.scheduler.failure is None


class AdministrativeCall(EngineAction, action_bases.AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True):
    """A call that has a body too, and that the server's front end turns into its message."""

    @property
    def body(self) -> Mapping[str, Any] | None:
        return None

    def is_sent_as(self, message: ClientMessage) -> bool:
        """Whether this message is this call, whatever its id."""
        call_id = getattr(message, "call_id", None)
        return call_id is not None and message == self.message(call_id)


class Intervention(EngineAction, frozen=True, kw_only=True, omit_defaults=True):
    """An action of an operator who holds the gate: effective at once, between two steps."""

    event: ClassVar[Any]
    is_control: ClassVar[bool] = True

    def operator_event(self) -> OperatorEvent:
        """What the operator does: its event, with the same fields."""
        event: OperatorEvent = self.event(**msgspec.structs.asdict(self))
        return event

    def apply(self, run: RunLike) -> None:
        event = self.operator_event()
        run.happened(event)
        run.machine.intervene(event)


def all_actions() -> tuple[type[Action], ...]:
    """Every concrete action, in the order in which a search tries them."""
    return tuple(sorted((cls for cls in _classes if cls.__struct_config__.tag), key=lambda cls: cls.search_turn))
