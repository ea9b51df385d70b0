"""The interface of actions: all that the harness asks of what may happen to a scheduler from outside.

A schedule's text, the search, scripts, recordings, the shell and reports ask the classes. An adapter names its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from scripted.core.clock import VirtualClock
from scripted.core.results import Results
from scripted.core.verb import Verb

_Function = TypeVar("_Function", bound=Callable[..., Any])


class RunLike:
    """What a run of a schedule is to actions: they act on it before a step."""

    step: int
    implied: list[Any]
    machine: Any
    device: Any
    oracle: Any
    clock: VirtualClock
    results: Results

    def __init__(self) -> None:
        self._events: list[Any] = []
        # Of the events of the next step, those that took effect already.
        self._already = 0
        self._calls = 0
        self._holding = False

    @property
    def config(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} says of what configuration it is")

    @property
    def stalled(self) -> set[int]:
        """Stages that are stopped: while there is one, no result comes."""
        return self.results.stalled

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return self.oracle.is_settled  # type: ignore[no-any-return]

    @property
    def is_holding(self) -> bool:
        return self._holding

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        return self.oracle.is_live(rid)  # type: ignore[no-any-return]

    def new_call_id(self) -> str:
        self._calls += 1
        return f"call-{self._calls}"

    @property
    def given(self) -> Sequence[Any]:
        """The events of the next step so far."""
        return self._events

    def give(self, event: Any) -> None:
        self._events.append(event)

    def happened(self, event: Any) -> None:
        """This took effect already, between two steps: it stands before the events of the next step."""
        self._events.insert(self._already, event)
        self._already += 1

    def hold_results(self) -> None:
        """Keep results back from the next step on."""
        self._holding = True
        self.results.hold()

    def release_results(self, count: int | None) -> None:
        """Let the oldest ``count`` through, or all and stop holding."""
        self._holding = self._holding and count is not None
        self.results.release(count)

    def lose_results(self) -> None:
        self.results.lose()
        self._holding = False


class SearchBase(msgspec.Struct, frozen=True):
    """What a base schedule offers to additions: the requests to aim at, and which kinds of action it has itself.

    ``config`` and ``limits`` are the adapter's own.
    """

    config: Any
    limits: Any
    starts: tuple[Action, ...]
    kinds: frozenset[type[Action]]

    @property
    def rids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rid for start in self.starts if (rid := getattr(start, "rid", None)) is not None))

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The seconds after which a request of ``starts`` ends by itself, each number once."""
        given = [limit for start in self.starts for limit in getattr(start, "time_limits", ())]
        return tuple(dict.fromkeys([*given, *getattr(self.limits, "time_limits", ())]))


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all actions. A concrete one has a tag, the first word of its clause, and its fields as the others.

    ``examples`` are clauses without their steps, of requests called a and b. ``event`` is the type of the event that it
    becomes, if it becomes one, and ``phrase`` what a report calls it.
    ``is_start``: it begins the request of its ``rid``. ``is_control``: it acts on the world and not on the scheduler,
    before the completions of its step are taken. ``is_fatal``: nothing can be served after it. ``is_extra``: a search
    adds one with its default values; ``added_beside`` is the tag of an action that a workload must have for that.
    ``is_strict``: its verb refuses to act on nothing. ``needs_open``: it acts on nothing when every request has ended
    and every call is answered. ``shell_words`` are short words that the shell has for verbs; it
    knows any other verb by its name. ``search_turn`` orders what a search tries at one step; equal ones are tried in
    the order of their definition.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    event: ClassVar[type[msgspec.Struct] | None] = None
    phrase: ClassVar[str] = ""
    is_start: ClassVar[bool] = False
    is_control: ClassVar[bool] = False
    is_fatal: ClassVar[bool] = False
    is_extra: ClassVar[bool] = False
    added_beside: ClassVar[str] = ""
    is_strict: ClassVar[bool] = False
    needs_open: ClassVar[bool] = False
    shell_words: ClassVar[Mapping[str, str]] = {}
    search_turn: ClassVar[int] = 0

    @property
    def kind(self) -> str:
        """One word for what it does: its tag, with the field that makes it a kind of its own."""
        return str(type(self).__struct_config__.tag)

    @property
    def target_rid(self) -> str | None:
        """The rid of the request that it aims at, if it aims at one."""
        return None if self.is_start else getattr(self, "rid", None)

    # -- what it does --

    def apply(self, run: RunLike) -> None:
        """Do it to a run, before a step."""
        raise NotImplementedError(f"{type(self).__name__} says how it is applied")

    def reaches(self, run: RunLike) -> bool:
        """Whether there is something for it to act on."""
        return not (self.needs_open and run.is_settled) and (self.target_rid is None or run.is_live(self.target_rid))

    def verbs(self) -> tuple[Verb, ...]:
        """The calls of a script that do the same: the verb of its class, which takes its fields in their order."""
        ((name, function),) = verbs_of(type(self)).items()
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for parameter, field in zip(parameters, self.__struct_fields__, strict=False):
            value = getattr(self, field)
            value = value.value if isinstance(value, Enum) else value
            if parameter.name == field and parameter.default is not inspect.Parameter.empty:
                keywords |= {field: value} if value != parameter.default else {}
            elif value != parameter.default:
                arguments.append(value)
        return (Verb(name, *arguments, **keywords),)

    def perform(self, t: Any) -> bool:
        """Do it in a script; False when there was nothing to act on."""
        for verb in self.verbs():
            verb.perform(t)
        return self.target_rid is None or t.find_req_by_rid(self.target_rid) is not None

    # -- what a search makes of it --

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """What of this kind can be added to a base schedule, at any step."""
        if not cls.is_start and "rid" in cls.__struct_fields__:
            return [cls(rid=rid) for rid in base.rids]
        is_beside = any(kind.__struct_config__.tag == cls.added_beside for kind in base.kinds)
        return (cls(),) if cls.is_extra or is_beside else ()

    def smaller(self) -> Iterator[Action]:
        """Smaller actions of the same kind, for shrinking: one field at its default."""
        return with_defaults(self)

    # -- events and words --

    @classmethod
    def read_back(cls, event: Any, reader: Any) -> Self | None:
        """The action that became this event, which is of type ``event``; None when it was another one's.

        As it stands here, its fields are those of the event that have their names.
        """
        del reader
        return cls(**{name: getattr(event, name) for name in cls.__struct_fields__ if hasattr(event, name)})

    @classmethod
    def words(cls, event: Any) -> str:
        del event
        return cls.phrase

    @classmethod
    def name_in_answers(cls, event: Any) -> str:
        """What the answer to the event is called in reports."""
        return cls.phrase or cls.words(event)


def words_of(event: Any, actions: Iterable[type[Action]]) -> str:
    """The phrase of a report for an event that one of these actions makes; empty for any other event."""
    return next((action.words(event) for action in actions if action.event is type(event)), "")


def name_in_answers(event: Any, actions: Iterable[type[Action]]) -> str:
    """The name of an event in the words of its answer; empty for an event that none of these actions makes."""
    return next((action.name_in_answers(event) for action in actions if action.event is type(event)), "")


def with_defaults(action: Action) -> Iterator[Action]:
    """The same with one field at its default."""
    for field in msgspec.structs.fields(action):
        if not field.required and getattr(action, field.name) != field.default:
            yield msgspec.structs.replace(action, **{field.name: field.default})


def smaller_requests(start: Action) -> Iterator[Action]:
    """A request with one field at its default; with a shorter prompt or output, smaller seeds: one number less."""
    # How long its output is shrinks by itself; the default is as good as any other number.
    new = getattr(start, "new")  # noqa: B009 - of a request, whichever adapter's
    yield from (smaller for smaller in with_defaults(start) if smaller.new == new)  # type: ignore[attr-defined]
    for name, least in (("prompt", 1), ("new", 1), ("priority", 0), ("seed", 0), ("shared", 0), ("tail", 0)):
        value = getattr(start, name)
        for smaller in dict.fromkeys((least, value // 2, value - value // 4, value - 1)):
            if least <= smaller < value:
                yield msgspec.structs.replace(start, **{name: smaller})


def verb(function: _Function) -> _Function:
    """Marks a static method of an action's class as a verb of ``t``: it is called with ``t`` and its own arguments."""
    function.is_verb = True  # type: ignore[attr-defined]
    return function


def verbs_of(action: type[Action]) -> Mapping[str, Callable[..., Any]]:
    """The verbs of ``t`` that this very class defines, by name."""
    functions = {name: member.__func__ for name, member in vars(action).items() if isinstance(member, staticmethod)}
    return {name: function for name, function in functions.items() if getattr(function, "is_verb", False)}
