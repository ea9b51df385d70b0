"""The interface of actions: everything that can happen to a scheduler from outside.

Schedules, the search, scripts, recordings, the shell and reports use it. An adapter lists its action classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, NamedTuple, NoReturn, Protocol, Self, TypeVar, runtime_checkable

import msgspec

from scripted.core.account import RequestMessage
from scripted.core.clock import VirtualClock
from scripted.core.machine import ConfigT, DeviceT, EventT, LimitsT, MachineT, OutputT, RecordT, StepT
from scripted.core.oracle import OracleT
from scripted.core.results import Results
from scripted.core.verb import Verb

_Function = TypeVar("_Function", bound=Callable[..., object])
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")
_verbs: Final[set[Callable[..., object]]] = set()


class RequestSoFar(NamedTuple):
    """A request and its output so far."""

    message: RequestMessage
    said: Sequence[int]


class RunLike(Generic[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]):
    """The view of a run for adapters, and for actions, which change it between two steps.

    ``arrived``: events that came in between two steps and belong to the next one. ``records`` is None unless the run
    keeps records.
    """

    step: int
    machine: MachineT
    device: DeviceT
    oracle: OracleT
    clock: VirtualClock
    results: Results
    arrived: list[EventT]
    records: list[RecordT] | None
    # Runs of other machines whose requests an action may continue, while it is applied.
    beside: Sequence[RunLike] = ()

    def __init__(self) -> None:
        self._events: list[EventT] = []
        # How many events of the next step have already taken effect; they come first.
        self._already = 0
        self._calls = 0
        self._holding = False

    @property
    def config(self) -> ConfigT:
        raise NotImplementedError(f"{type(self).__name__} has no configuration; define config")

    @property
    def previous(self) -> OutputT | None:
        """The output of the last step; None before the first."""
        raise NotImplementedError(f"{type(self).__name__} keeps no outputs; define previous")

    @property
    def own_state(self) -> tuple[object, ...]:
        """The state that later steps depend on, besides machine, device, oracle and schedule."""
        raise NotImplementedError(f"{type(self).__name__} does not state what later steps depend on; define own_state")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the loop; ``exc`` is the exception that ended it."""

    def next_step(self, previous: OutputT | None) -> StepT | None:
        """Judge the last step and compose the next one; None when the run has ended. Raises Violation."""
        raise NotImplementedError(f"{type(self).__name__} composes no steps; define next_step")

    def note_implied(self, action: Action) -> None:
        """Note an action that the run itself took to settle; no schedule contains it."""
        raise NotImplementedError(f"{type(self).__name__} notes no actions; define note_implied")

    def fault(self, text: str) -> NoReturn:
        """Raise HarnessError: the harness or the adapter is at fault, so the run says nothing about the scheduler."""
        raise NotImplementedError(f"{type(self).__name__} reports no faults; define fault")

    @property
    def stalled(self) -> set[int]:
        """The stopped stages; no result arrives while there are any."""
        return self.results.stalled

    @property
    def is_settled(self) -> bool:
        """Whether every request has ended and every call has been answered."""
        return self.oracle.is_settled

    @property
    def is_holding(self) -> bool:
        return self._holding

    def is_live(self, rid: str) -> bool:
        """Return whether a request with this rid has begun and not yet ended."""
        return self.oracle.is_live(rid)

    def request_so_far(self, rid: str) -> RequestSoFar | None:
        """Return the last request with this rid and its output so far; None if the rid is unknown or was refused."""
        for event in (*reversed(self._events), *reversed(self.arrived)):
            if isinstance(event, RequestMessage) and event.rid == rid:
                return RequestSoFar(event, ())
        life = self.oracle.account.latest(rid)
        if life is not None:
            return RequestSoFar(life.message, life.said)
        return next((found for one in self.beside if (found := one.request_so_far(rid)) is not None), None)

    def new_call_id(self) -> str:
        self._calls += 1
        return f"call-{self._calls}"

    @property
    def given(self) -> Sequence[EventT]:
        """The events of the next step so far."""
        return self._events

    def give(self, event: EventT) -> None:
        self._events.append(event)

    def happened(self, event: EventT) -> None:
        """Record an event that already took effect between two steps; it precedes the events of the next step."""
        self._events.insert(self._already, event)
        self._already += 1

    def hold_results(self) -> None:
        """Withhold results from the next step on."""
        self._holding = True
        self.results.hold()

    def release_results(self, count: int | None) -> None:
        """Release the oldest ``count`` results; None releases all and ends the hold."""
        self._holding = self._holding and count is not None
        self.results.release(count)

    def lose_results(self) -> None:
        self.results.lose()
        self._holding = False


@runtime_checkable
class HasTimeLimits(Protocol):
    """The limits of a configuration after which requests end by themselves."""

    @property
    def time_limits(self) -> Sequence[float]:
        """The seconds after which a request ends by itself."""
        ...


class SearchBase(msgspec.Struct, Generic[ConfigT, LimitsT], frozen=True):
    """A base schedule as the generators of additions see it: its requests and its kinds of actions.

    ``config`` and ``limits`` have the adapter's types.
    """

    config: ConfigT
    limits: LimitsT
    starts: tuple[Action, ...]
    kinds: frozenset[type[Action]]

    @property
    def rids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rid for start in self.starts if (rid := rid_of(start)) is not None))

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The seconds after which a request of ``starts`` ends by itself, without duplicates."""
        given = [limit for start in self.starts for limit in start.time_limits]
        of_all = self.limits.time_limits if isinstance(self.limits, HasTimeLimits) else ()
        return tuple(dict.fromkeys([*given, *of_all]))


class Culprit(StrEnum):
    """The party that can cause an action on a server, and thereby a defect."""

    CLIENT = "any client"
    NAMED_CLIENT = "a client that chooses ids"
    OPERATOR = "an operator"
    CONNECTOR = "a connector"
    HARDWARE = "hardware"


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base class of actions. The text of a clause is the tag followed by the fields.

    ``examples``: clauses without their steps, for requests a and b. ``event``: the type of event that the action
    becomes, if any. ``phrase``: its name in reports. ``is_start``: begins the request of its ``rid``. ``is_control``:
    acts on the world rather than on the scheduler, before its step takes completions. ``is_fatal``: the engine serves
    nothing afterwards. ``is_extra``: a search adds it with default fields; ``added_beside``: also to a workload that
    has an action with this tag. ``needs_open``: has no effect once every request has ended and every call has been
    answered. ``shell_words``: the shell's short words for its verbs, besides their names. ``search_turn``: its rank
    among the actions that a search tries at one step; ties keep the order of definition. ``part_of``: the kind of
    request, such as ``sessions``, whose lives consist of such actions; scenes of that kind have them. ``caused_by``:
    the party that can cause it on a server.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    event: ClassVar[type[msgspec.Struct] | None] = None
    phrase: ClassVar[str] = ""
    is_start: ClassVar[bool] = False
    is_control: ClassVar[bool] = False
    is_fatal: ClassVar[bool] = False
    is_extra: ClassVar[bool] = False
    added_beside: ClassVar[str] = ""
    needs_open: ClassVar[bool] = False
    shell_words: ClassVar[Mapping[str, str]] = {}
    search_turn: ClassVar[int] = 0
    part_of: ClassVar[str] = ""
    caused_by: ClassVar[Culprit] = Culprit.CLIENT

    @property
    def kind(self) -> str:
        """The kind in one word: the tag, in some classes followed by the field that tells kinds apart."""
        return str(type(self).__struct_config__.tag)

    @property
    def culprit(self) -> Culprit:
        """The party that can cause it on a server."""
        return self.caused_by

    @property
    def target_rid(self) -> str | None:
        """The rid of the request that it acts on, if any."""
        return None if self.is_start else rid_of(self)

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The seconds after which the request that it begins ends by itself."""
        return ()

    # -- effects --

    def apply(self, run: RunLike) -> None:
        """Apply it to a run, before a step."""
        raise NotImplementedError(f"{type(self).__name__} has no effect on a run; define apply")

    def reaches(self, run: RunLike) -> bool:
        """Return whether it has anything to act on."""
        return not (self.needs_open and run.is_settled) and (self.target_rid is None or run.is_live(self.target_rid))

    def is_distinct(self, run: RunLike) -> bool:
        """Return whether it has an effect now, and not the same as another action or as itself one step later."""
        del run
        return True

    def verbs(self) -> tuple[Verb, ...]:
        """Return the equivalent calls in a script: the class's verb, with the fields in order as arguments."""
        ((name, function),) = verbs_of(type(self)).items()
        arguments: list[object] = []
        keywords: dict[str, object] = {}
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for parameter, (field, value) in zip(parameters, _fields_of(self).items(), strict=False):
            value = value.value if isinstance(value, Enum) else value
            if parameter.name == field and parameter.default is not inspect.Parameter.empty:
                keywords |= {field: value} if value != parameter.default else {}
            elif value != parameter.default:
                arguments.append(value)
        return (Verb(name, *arguments, **keywords),)

    def perform(self, t: Any) -> bool:
        """Perform it in a script; False when there was nothing to act on."""
        for verb in self.verbs():
            verb.perform(t)
        return self.target_rid is None or t.find_req_by_rid(self.target_rid) is not None

    # -- search --

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Generate the actions of this class that can be added to a base schedule, at any step."""
        if not cls.is_start and "rid" in cls.__struct_fields__:
            return [cls(rid=rid) for rid in base.rids]
        is_beside = any(kind.__struct_config__.tag == cls.added_beside for kind in base.kinds)
        return (cls(),) if cls.is_extra or is_beside else ()

    def renamed(self, names: Mapping[str, str]) -> Action:
        """Return the action with its rids replaced; ``names`` maps old rids to new ones."""
        new = names.get(rid_of(self) or "")
        return self if new is None else msgspec.structs.replace(self, rid=new)

    def with_handles(self, variables: Container[str]) -> Action:
        """Return the same action for a script whose only handles are these variables."""
        del variables
        return self

    def smaller(self) -> Iterator[Action]:
        """Yield simpler actions of the same kind, for shrinking: one field set to its default."""
        return with_defaults(self)

    # -- events and words --

    @classmethod
    def read_back(cls, event: Any, reader: Any) -> Self | None:
        """Return the action that became this event of type ``cls.event``; None if another class's action did.

        By default its fields are the event's fields of the same names.
        """
        del reader
        fields = msgspec.structs.asdict(event)
        return cls(**{name: fields[name] for name in cls.__struct_fields__ if name in fields})

    @classmethod
    def words(cls, event: Any) -> str:
        del event
        return cls.phrase

    @classmethod
    def name_in_answers(cls, event: Any) -> str:
        """Name the answer to the event in reports."""
        return cls.phrase or cls.words(event)


def words_of(event: object, actions: Iterable[type[Action]]) -> str:
    """Describe an event in a report through the action that becomes it; empty if none of these actions does."""
    return next((action.words(event) for action in actions if action.event is type(event)), "")


def name_in_answers(event: object, actions: Iterable[type[Action]]) -> str:
    """Name the answer to an event in a report; empty if none of these actions becomes the event."""
    return next((action.name_in_answers(event) for action in actions if action.event is type(event)), "")


def rid_of(action: Action) -> str | None:
    """Return the rid that an action names; None if it acts on no request."""
    rid: str | None = getattr(action, "rid", None)
    return rid


def with_defaults(action: Action) -> Iterator[Action]:
    """Yield the action with one field set to its default."""
    values = _fields_of(action)
    for field in msgspec.structs.fields(action):
        if not field.required and values[field.name] != field.default:
            yield msgspec.structs.replace(action, **{field.name: field.default})


def smaller_requests(start: Action) -> Iterator[Action]:
    """Yield simpler requests: one field set to its default, or one number (a length, a seed, the priority) smaller."""
    numbers: dict[str, int] = {name: value for name, value in _fields_of(start).items() if type(value) is int}
    # The default output length is no simpler than another one; the loop below makes it smaller.
    yield from (smaller for smaller in with_defaults(start) if _fields_of(smaller)["new"] == numbers["new"])
    for name, least in (("prompt", 1), ("new", 1), ("priority", 0), ("seed", 0), ("shared", 0), ("tail", 0)):
        value = numbers[name]
        for smaller in dict.fromkeys((least, value // 2, value - value // 4, value - 1)):
            if least <= smaller < value:
                yield msgspec.structs.replace(start, **{name: smaller})


def _fields_of(action: Action) -> dict[str, object]:
    return msgspec.structs.asdict(action)


def verb(function: _Function) -> _Function:
    """Mark a static method of an action class as a verb of ``t``: it takes ``t`` and the arguments of the call."""
    _verbs.add(function)
    return function


def takes(options: Callable[..., _Options]) -> Callable[[Callable[[Any, _Options], _Result]], Callable[..., _Result]]:
    """Let a verb's function take one object of ``options``, whose fields are the verb's keyword arguments."""

    def decorate(function: Callable[[Any, _Options], _Result]) -> Callable[..., _Result]:
        own, fields = inspect.signature(function), inspect.signature(options).parameters

        @functools.wraps(function)
        def called(t: Any, /, **arguments: object) -> _Result:
            return function(t, options(**arguments))

        # Help, the shell and the check of a script's calls read the signature.
        vars(called)["__signature__"] = own.replace(parameters=[next(iter(own.parameters.values())), *fields.values()])
        return called

    return decorate


def verbs_of(action: type[Action]) -> Mapping[str, Callable[..., object]]:
    """Return the verbs of ``t`` that this class itself defines, by name."""
    functions = {name: member.__func__ for name, member in vars(action).items() if isinstance(member, staticmethod)}
    return {name: function for name, function in functions.items() if function in _verbs}
