"""The interface of actions: all that the harness asks of one. Every subclass of ``Action`` with a tag is known.

Nothing else in the harness lists actions: a schedule's text, the search, scripts, recordings, the shell and reports
ask the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, Self

import msgspec

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import ClientMessage, Event, Generate, OperatorEvent
from engine.scheduler import Scheduler
from scripted.actions.shell_words import ShellWord
from scripted.actions.verb import Verb

__all__ = [
    "Action",
    "AdministrativeCall",
    "EventReader",
    "Intervention",
    "Recipe",
    "SearchBase",
    "SearchedEngine",
    "all_actions",
]

_classes: list[type[Action]] = []


class SearchedEngine(Protocol):
    """What an action acts on where no script runs: an engine of the search, before one of its steps."""

    scheduler: Scheduler
    limits: Limits
    clock: VirtualClock

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_holding(self) -> bool: ...

    @property
    def is_pressed(self) -> bool:
        """An operator keeps memory from requests."""
        ...

    @property
    def stalled_stages(self) -> set[int]:
        """Stages that are stopped."""
        ...

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        ...

    def new_call_id(self) -> str:
        """The id of the next administrative call."""
        ...

    def give(self, event: Event) -> None:
        """The next step sees this event."""
        ...

    def intervene(self, event: OperatorEvent) -> None:
        """Apply an operator's event at once."""
        ...

    def hold_results(self) -> None:
        """Keep results back from the next step on."""
        ...

    def release_results(self, count: int | None) -> None:
        """Let the oldest ``count`` through, or all and stop holding."""
        ...

    def stall_stage(self, stage: int) -> None: ...

    def resume_stage(self, stage: int) -> None:
        """Let a stopped stage go on."""
        ...

    def fail_next_step(self, stage: int) -> None:
        """Make a stage's next microbatch fail."""
        ...

    def kill_stage(self, stage: int) -> None: ...


class SearchBase(msgspec.Struct, frozen=True):
    """What a base schedule offers to additions: the requests to aim at, and which kinds of action it has itself."""

    config: EngineConfig
    limits: Limits
    starts: tuple[Action, ...]
    kinds: frozenset[type[Action]]

    @property
    def rids(self) -> tuple[str, ...]:
        """The rids of ``starts``, each once."""
        return tuple(dict.fromkeys(rid for start in self.starts if (rid := getattr(start, "rid", None)) is not None))


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens: all of ``seed``, or ``shared`` of them and the rest of ``tail``."""

    seed: int
    shared: int = 0
    tail: int = 0


class EventReader(Protocol):
    """What reading an action back from a recorded event needs: names and prompts that a schedule can express."""

    def name_of(self, rid: str) -> str:
        """What the request of this rid is called here."""
        ...

    def new_name_of(self, rid: str) -> str:
        """The same for a request that begins."""
        ...

    def new_tokens_of(self, message: Generate) -> int:
        """How many tokens a request that begins is to have in the end."""
        ...

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        """How a schedule makes a prompt that shares with those before it what this one does."""
        ...


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all actions. A concrete one has a tag, the first word of its clause, and its fields as the others.

    ``examples`` are clauses without their steps, of requests called a and b. ``event`` is the type of the event that it
    becomes, if it becomes one, and ``phrase`` what a report calls it.
    ``is_control``: it acts on the world and not on the scheduler, before the completions of its step are taken.
    ``is_extra``: a search adds one with its default values. ``is_strict``: its verb refuses to act on nothing.
    ``shell_words`` are typed in the shell. ``search_turn`` orders what a search tries at one step; equal ones are tried
    in the order of their definition.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    event: ClassVar[type[msgspec.Struct] | None] = None
    phrase: ClassVar[str] = ""
    is_control: ClassVar[bool] = False
    is_extra: ClassVar[bool] = False
    is_strict: ClassVar[bool] = False
    shell_words: ClassVar[tuple[ShellWord, ...]] = ()
    search_turn: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _classes.append(cls)

    @property
    def kind(self) -> str:
        """One word for what it does: its tag, with the field that makes it a kind of its own."""
        return str(type(self).__struct_config__.tag)

    @property
    def target_rid(self) -> str | None:
        """The rid of the request that it aims at, if it aims at one."""
        return None

    # -- what it does --

    def apply(self, engine: SearchedEngine) -> None:
        """Do it to an engine of the search, before a step."""
        raise NotImplementedError(f"{type(self).__name__} says how it is applied")

    def reaches(self, engine: SearchedEngine) -> bool:
        """Whether there is something for it to act on."""
        return engine.scheduler.failure is None

    def verbs(self) -> tuple[Verb, ...]:
        """The calls of a script that do the same."""
        raise NotImplementedError(f"{type(self).__name__} says which verb of t does it")

    def perform(self, t: Any) -> bool:
        """Do it in a script; False when there was nothing to act on."""
        for verb in self.verbs():
            verb.perform(t)
        return self.target_rid is None or t.find_req_by_rid(self.target_rid) is not None

    # -- what a search makes of it --

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """What of this kind can be added to a base schedule, at any step."""
        return (cls(),) if cls.is_extra else ()

    def smaller(self) -> Iterator[Action]:
        """Smaller actions of the same kind, for shrinking."""
        return iter(())

    # -- events and words --

    @classmethod
    def read_back(cls, event: Any, reader: EventReader) -> Self | None:
        """The action that became this event, which is of type ``event``; None when it was another one's."""
        return cls()

    @classmethod
    def words(cls, event: Any) -> str:
        """What a report says of its event."""
        return cls.phrase

    @classmethod
    def name_in_answers(cls, event: Any) -> str:
        """What the answer to the event is called in reports."""
        return cls.phrase or cls.words(event)


class AdministrativeCall(Action, frozen=True, kw_only=True, omit_defaults=True):
    """An action that is an administrative call: POST to ``route``, one message, one answer."""

    route: ClassVar[str]

    @property
    def path(self) -> str:
        """Where it is posted to, with the query."""
        return self.route

    @property
    def body(self) -> Mapping[str, Any] | None:
        """The JSON that is posted."""
        return None

    def message(self, call_id: str) -> ClientMessage:
        """What the front end makes of the call."""
        raise NotImplementedError(f"{type(self).__name__} says which message it is")

    def is_sent_as(self, message: ClientMessage) -> bool:
        """Whether this message is this call, whatever its id."""
        call_id = getattr(message, "call_id", None)
        return call_id is not None and message == self.message(call_id)

    def apply(self, engine: SearchedEngine) -> None:
        """The next step sees the message."""
        engine.give(self.message(engine.new_call_id()))


class Intervention(Action, frozen=True, kw_only=True, omit_defaults=True):
    """An action of an operator who holds the gate: effective at once, between two steps."""

    is_control: ClassVar[bool] = True

    def operator_event(self) -> OperatorEvent:
        """What the operator does."""
        raise NotImplementedError(f"{type(self).__name__} says which operator's event it is")

    def apply(self, engine: SearchedEngine) -> None:
        engine.intervene(self.operator_event())


def all_actions() -> tuple[type[Action], ...]:
    """Every concrete action, in the order in which a search tries them."""
    return tuple(sorted((cls for cls in _classes if cls.__struct_config__.tag), key=lambda cls: cls.search_turn))
