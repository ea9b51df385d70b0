"""Assertions that hold whatever the engine answers: a script runs again while answers that it reads are replaced.

An answer is what an attribute or a call of ``t``, of a handle, or of anything that came from them returns to the script
and its helpers. Each run replaces some by others that they might have been, from a place in the script on; an assertion
that fails is noted, and the run goes on. What was asked twice at one moment is answered alike.
"""

from __future__ import annotations

import builtins
import copy
import enum
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final

from scripted.core.errors import BadCall, RequestRefused
from scripted.core.installed import harness_packages
from scripted.script.clients import Call, ClientView
from scripted.script.context import BaseContext
from scripted.script.handles import BaseRequest
from scripted.script.static_checks import Method
from scripted.script.values import Named, Status, Word

# The methods of ``t`` that only look; any other acts, and what is asked after it is asked at another moment.
_QUERIES: Final = frozenset(
    {"find_req_by_rid", "is_finished", "is_chunking", "status", "list_active_reqs", "batch_composition"}
    | {"engine_stats", "get_all_node_hit_counts", "get_all_node_lock_refs", "stage", "sometimes"}
)
# What the client chose itself.
_CHOSEN: Final = frozenset({"rid", "prompt_ids", "max_new_tokens", "sampling", "streams", "name", "choices"})
_MAY_BE_NONE: Final = frozenset({"find_req_by_rid", "req", "window", "host"})
_ENDED: Final = ("finished", "aborted")
_PLAIN: Final = (bool, int, float, str, bytes, type(None), tuple, list, dict, set, frozenset, enum.Enum)
_OWN: Final = harness_packages() | {"engine"}
_BUILTINS: Final = frozenset(one for one in vars(builtins).values() if callable(one)) - {repr, str, vars, format}
_OTHER: Final = "another"
_MANY: Final = 1_000_000
_MANY_ELEMENTS: Final = 100
_MOST_ENTRIES: Final = 8
_STALE: Final = 2.0
# Of each run: how likely an answer is replaced, that of a wait's predicate, and a live object by None; at 1 all are
# replaced by what is nothing, or all by what is more, and so on. In one of them whatever is asked stays as it was.
_RUNS: Final = (
    (1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.5, 0.1, 0.0), (0.3, 0.0, 0.3), (0.1, 0.05, 0.0), (0.8, 0.0, 0.0),
    (_STALE, 0.0, 0.0),
)  # fmt: skip
_ROUNDS: Final = 16
_STARTS: Final = 3
# An assertion that few runs came to is not spoken of.
_FEWEST: Final = 6


class Liar:
    """Replaces the answers of one run after the other. ``constants`` are those of the script.

    With ``keeps_waits`` what a wait has waited for is true when it is over. Assertions go by numbers.
    """

    failure: Final = Exception

    def __init__(
        self, constants: frozenset[Any] = frozenset(), *, keeps_waits: bool = False, is_on: bool = True
    ) -> None:
        self.is_on = is_on
        self._keeps_waits = keeps_waits
        self._constants: dict[type, list[Any]] = {}
        for one in sorted(constants, key=repr):
            self._constants.setdefault(type(one), []).append(one)
        # How often each assertion was asked, and those that failed.
        self._asked: dict[int, int] = {}
        self._failed: set[int] = set()
        # How many failures there were when an assertion that calls others began.
        self._before: dict[int, int] = {}
        self._failures = 0
        self._most_reads = 0
        self._order: list[int] = []
        # The assertion behind which answers are replaced.
        self._after: int | None = None
        self._t: BaseContext | None = None
        self._begin(0, 0.0, 0.0, 0.0, 0, None)

    def runs(self, numbers: set[int]) -> Iterator[None]:
        """Each time, the answers are other ones, until these assertions have failed or there were enough runs.

        They are other ones from the first on, from one or two assertions before one of those that are left, or from
        anywhere on.
        """
        for number in range(_ROUNDS * len(_RUNS)):
            left = sorted(numbers - self._failed)
            if not left:
                return
            chance, waiting, none = _RUNS[number % len(_RUNS)]
            chosen = random.Random(number)  # noqa: S311
            first, after = 0, None
            if number % _STARTS == 1:
                first = chosen.randrange(max(1, self._most_reads))
            elif number % _STARTS and (target := chosen.choice(left)) in self._order:
                place = self._order.index(target) - chosen.choice((1, 1, 2))
                after = self._order[place] if place >= 0 else None
            self._begin(number, chance, waiting, none, first, after)
            yield
            self._most_reads = max(self._most_reads, self._reads)

    @property
    def has_failure(self) -> bool:
        return bool(self._failed)

    @property
    def deaf(self) -> frozenset[int]:
        """The assertions that no answer made fail."""
        return frozenset(number for number, times in self._asked.items() if times >= _FEWEST) - self._failed

    # -- what counted code calls --

    def reached(self, number: int) -> None:
        self._before[number] = self._failures

    def held(self, number: int) -> None:
        """It was asked. One that calls others has failed with them."""
        if self.is_on:
            self._asked[number] = self._asked.get(number, 0) + 1
            if number == self._after:
                self._after = None
            if number not in self._order:
                self._order.append(number)
        if self._before.get(number) != self._failures:
            self._failed.add(number)

    def failed(self, number: int) -> bool:
        """It raised, and the run may go on. What the harness refuses to compare says nothing of it."""
        if self.is_on and not isinstance(sys.exception(), BadCall):
            self._failed.add(number)
            self._failures += 1
        return self.is_on

    def read(self, owner: Any, name: str) -> Any:
        """An attribute that the script asks for."""
        value = getattr(owner, name)
        if not self.is_on or not self._is_engines(owner):
            return value
        if isinstance(owner, BaseContext):
            self._t = owner
        if isinstance(value, Method) and name == "run_until":
            return self._waiting(value)
        if name in _CHOSEN and isinstance(owner, (BaseRequest, ClientView, Call)):
            self._chosen[id(value)] = value
            return value
        if isinstance(value, (Method, types.MethodType, types.BuiltinMethodType, types.FunctionType)):
            return self._calling(owner, name, value)
        return self._answer(owner, name, value)

    def function(self, function: Any) -> Any:
        """A function that the script calls: what one of the engine returns is an answer, and what is made of one."""
        if not self.is_on or (isinstance(function, type) and function is not str):
            return function
        if function is getattr:
            return self._getattr
        if not callable(function) or _is_in(_BUILTINS, function) or _is_written_by_the_user(function):
            return function
        is_own = _package(getattr(function, "__module__", None)) in _OWN

        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if is_own or any(map(self._is_engines, args)):
                return self._answer(function, function.__name__, result)
            return result

        return called

    # -- inside --

    def _begin(self, number: int, chance: float, waiting: float, none: float, first: int, after: int | None) -> None:
        self._number, self._chance, self._waiting_chance, self._none = number, chance, waiting, none
        self._first, self._after = first, after
        self._reads = 0
        self._is_waiting = False
        self._t = None
        self._acts = 0
        # What the script chose itself, and what came from the engine and is of no class of it.
        self._chosen: dict[int, Any] = {}
        self._came: dict[int, Any] = {}
        self._waited_for: set[int] = set()
        self._seen: dict[type, list[Any]] = {}
        self._told: dict[str, Any] = {}

    def _is_engines(self, owner: Any) -> bool:
        if isinstance(owner, (type, types.ModuleType, *_PLAIN)) or id(owner) in self._chosen:
            return False
        kind = type(owner)
        is_own = _package(kind.__module__) in _OWN and not kind.__name__.endswith("Config")
        return is_own or id(owner) in self._came

    def _getattr(self, owner: Any, name: str, *default: Any) -> Any:
        return default[0] if default and not hasattr(owner, name) else self.read(owner, name)

    def _waiting(self, run_until: Any) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            predicate = args[0] if args else kwargs.get("predicate")
            if not isinstance(predicate, types.FunctionType):
                return run_until(*args, **kwargs)

            def asked() -> Any:
                self._is_waiting = True
                try:
                    return predicate()
                finally:
                    self._is_waiting = False

            return run_until(asked, *args[1:], **{name: one for name, one in kwargs.items() if name != "predicate"})

        return wait

    def _calling(self, owner: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._acts += isinstance(method, Method) and name not in _QUERIES
            if name.startswith("run_until_"):
                handles = (*args, *kwargs.values()) or (owner,)
                self._waited_for.update(map(id, itertools.chain(*(_each(one) for one in handles))))
            try:
                result = method(*args, **kwargs)
            except RequestRefused:
                if self._none and not self._answer(owner, name, value=True):
                    return None  # as if it had not been refused
                raise
            return result if name == "sometimes" else self._answer(owner, name, result, is_called=True)

        return called

    def _answer(self, owner: Any, name: str, value: Any, *, is_called: bool = False) -> Any:
        self._reads += 1
        is_plain = isinstance(value, _PLAIN)
        whose = getattr(owner, "rid", None) or getattr(owner, "call_id", None) or type(owner).__name__
        step = None if self._t is None else getattr(self._t.run, "step", None)
        what = repr(value) if is_plain else id(value)
        is_stale = self._chance == _STALE and self._after is None and self._reads > self._first
        if is_stale and is_plain and not is_called and not self._is_waiting:
            return self._told.setdefault(f"{type(owner).__name__} {whose} {name}", value)
        asked = f"{self._number} {type(owner).__name__} {whose} {name} {step} {self._acts} {what}"
        if asked in self._told:
            return self._told[asked]
        is_live = _package(type(owner).__module__) not in harness_packages()
        may_be_none = name in _MAY_BE_NONE or is_live
        told = self._told[asked] = self._tell(random.Random(asked), owner, name, value, may_be_none)  # noqa: S311
        return told

    def _tell(self, chosen: random.Random, owner: Any, name: str, value: Any, may_be_none: bool) -> Any:
        chance = self._waiting_chance if self._is_waiting else self._chance
        is_replaced = self._after is None and self._reads > self._first and chosen.random() < chance
        if not isinstance(value, _PLAIN):
            self._came[id(value)] = value
            return None if may_be_none and is_replaced and chosen.random() < self._none else value
        if isinstance(value, (list, tuple, set, frozenset)):
            self._came.update((id(one), one) for one in value if not isinstance(one, _PLAIN))
        kinds = [found for found in self._others(value) if found] if is_replaced and self._chance != _STALE else []
        if self._keeps_waits and kinds and (fact := self._fact(owner, name, value)) is not None:
            kinds = [fact] if fact else []
        self._note(value)
        if not kinds:
            return value
        if chance == 1:
            return kinds[0][self._number // len(_RUNS) % len(kinds[0])]
        return chosen.choice(chosen.choice(kinds))

    def _fact(self, owner: Any, name: str, value: Any) -> list[Any] | None:
        """What else may be answered where a wait is over that waited for this; None where none did."""
        is_idle = name == "is_fully_idle" and value and self._t is not None and id(self._t) in self._waited_for
        if not is_idle and id(owner) not in self._waited_for:
            return None
        if name == "status":
            return [one for one in others(value) if one in _ENDED] if value in _ENDED else None
        return [] if name in {"finished", "is_fully_idle", "is_running"} and value == (name != "is_running") else None

    def _note(self, value: Any) -> None:
        same = self._seen.setdefault(type(value), [])
        if len(same) < _MOST_ENTRIES and not any(one is value for one in same):
            same.append(value)

    def _others(self, value: Any) -> list[list[Any]]:
        """What might have been answered to this: any, the rids and what the script compares with, and other answers."""
        named: list[Any] = []
        handles = None if self._t is None else getattr(self._t.run, "handles", None)
        rids = sorted(handles.known_rids()) if handles is not None else []
        words = [*rids, *self._constants.get(str, ())]
        if type(value) in (int, float):
            named = list(self._constants.get(int, ()))
        elif type(value) is str:
            named = [*words, *(f"{value} {word}" for word in words)]
        elif value is None:
            named = words
        elif isinstance(value, (tuple, list)):
            named = [type(value)([*value, rid]) for rid in rids] + [type(value)([rid]) for rid in rids]
        same = [other for other in self._seen.get(type(value), ()) if other is not value and _are_alike(value, other)]
        return [list(others(value)), named, same]


def others(value: Any) -> Iterator[Any]:
    """What might have been answered instead: values of the same kind, and None for a text or an element."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, Status):
        yield from (Status(one) for one in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST) if one != int(value))
    elif isinstance(value, Word):
        yield from value.others()
    elif isinstance(value, enum.Enum):
        yield from (one for one in type(value) if one is not value)
    elif isinstance(value, (int, float)):
        yield from sorted({0, value + 1, max(0, value - 1), value + _MANY} - {value})
    elif isinstance(value, str):
        yield from ("", f"{value} {_OTHER}", None)
    elif value is None:
        yield from (_OTHER, 7)
    elif isinstance(value, (tuple, list)):
        yield from _other_sequences(value)
    elif isinstance(value, (set, frozenset)):
        yield from map(type(value), _other_sequences(list(value)))
    elif isinstance(value, dict):
        yield from _other_mappings(value)


def _other_sequences(value: Any) -> Iterator[Any]:
    made = type(value)
    if not value:
        yield from (made([_OTHER]), made([_OTHER] * _MANY_ELEMENTS))
        return
    yield from (made(()), made([*value, value[-1]]), made(value[:-1]), made([*value] * _MANY_ELEMENTS))
    yield from (made([other, *value[1:]]) for other in (*others(value[0]), None))
    yield from (made([*value[:-1], other]) for other in (*others(value[-1]), None))


def _other_mappings(value: dict[Any, Any]) -> Iterator[Any]:
    if isinstance(value, Named):
        changed = ({name: other} for name, one in value.items() for other in others(one))
    else:
        yield {} if value else {_OTHER: 1}
        changed = ({name: other} for name, one in list(value.items())[:_MOST_ENTRIES] for other in others(one))
    for change in changed:
        instead = copy.copy(value)
        instead.update(change)
        yield instead


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple, set)) else (value,)


def _are_alike(value: Any, other: Any) -> bool:
    """Whether what has elements has those of one type."""
    if not isinstance(value, (list, tuple)):
        return True
    return bool(value and other) and type(value[0]) is type(other[0])


def constants_of(code: types.CodeType) -> Iterator[Any]:
    """The numbers and the words of a function and of those in it."""
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from constants_of(one)
        elif type(one) in (int, str):
            yield one
        elif isinstance(one, (tuple, frozenset)):
            yield from (element for element in one if type(element) in (int, str))


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _is_in(known: frozenset[Any], one: Any) -> bool:
    try:
        return one in known
    except TypeError:
        return False


def _is_written_by_the_user(function: Any) -> bool:
    return "@scripted" in getattr(function, "__globals__", {})
