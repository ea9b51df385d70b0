"""Changes one answer that a script reads from the engine, to see whether an assertion depends on it.

An answer is an attribute of an object of the harness or the engine, or the result of one of its methods. A changed
answer is plausible: another reason, one page more. It changes between two steps or verbs, so that two consecutive reads
agree.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from scripted.core.action import verbs_of
from scripted.script.clients import Call, ClientView
from scripted.script.context import BaseContext, actions_behind
from scripted.script.handles import BaseRequest
from scripted.script.state import MicrobatchInFlight
from scripted.script.values import Condition, Status, Word

# Values that the script or the configuration chose, and records to which steps only add.
_GIVEN: Final = frozenset({
    "call_id", "choices", "history", "id", "max_new_tokens", "names", "page_size", "prompt_ids", "prompt_seed", "rid",
    "rids", "total",
})  # fmt: skip
# Answers that only grow.
_GROWING: Final = frozenset({"now", "step"})
# Answers that stay true once they are.
_LASTING: Final = frozenset({"arrived", "closed", "done", "dropped", "finished", "is_finished"})
_WAITS_FOR_REQUESTS: Final = frozenset({"run_until_all_finished", "run_until_finished"})
_WAIT_FOR_IDLE: Final = "run_until_idle"
# True after the wait until idle, until a verb is called.
_IDLE: Final = frozenset({"is_fully_idle", "is_quiescent"})
_SAME_END: Final = (frozenset({"finished", "aborted"}), frozenset({"waiting", "running"}))
_INSTEAD_OF_NONE: Final[dict[str, str]] = {"chunked": "another", "error": "an error", "paused": "in_place"}
_FIRST_ELEMENTS: Final[dict[str, object]] = {
    "in_flight": MicrobatchInFlight(id=0, mode="decode", rids=(), tokens=1, launched_at_step=1, due_at_step=2),
    "output_ids": 1,
    "running": "another",
    "token_ids": 1,
    "waiting": "another",
}
_REFUSED: Final = 400
_MANY: Final = 16

# The steps and verbs before a read.
_Moment = tuple[int, int]


class EngineAnswer(msgspec.Struct, frozen=True):
    """An attribute of one object or of a class's objects; ``owner`` is the class, numbered for requests and calls."""

    owner: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.attribute}"


class Change(msgspec.Struct, frozen=True):
    """Another answer from some moment on; ``how`` is a name from ``_others_of``."""

    answer: EngineAnswer
    how: str
    since: _Moment


class Answers:
    """Forwards the answers that one run of a script reads; a ``change``, if given, alters one of them.

    ``packages``: the packages of the engine, its adapter and the harness. Objects of class ``given`` stay as they are,
    and no mode becomes one of ``absent_modes``.
    """

    def __init__(
        self, packages: frozenset[str], given: type, absent_modes: frozenset[str], change: Change | None = None
    ) -> None:
        self._packages, self._given, self._absent_modes = packages, given, absent_modes
        self._change = change
        self._t: BaseContext | None = None
        self._verbs: frozenset[str] = frozenset()
        self._verbs_called = 0
        # The names of requests, clients, calls and of objects that methods of ``t`` have returned, by id.
        self._named: dict[int, tuple[object, str]] = {}
        # The ids of objects that the script has waited for, so that they must have ended.
        self._awaited: set[int] = set()
        # The number of verbs before the last wait until the engine was idle.
        self._idle_after: int | None = None
        # The possible changes, by answer and moment.
        self._found: dict[tuple[EngineAnswer, _Moment], dict[str, None]] = {}

    def begin(self, t: BaseContext) -> None:
        """Begin a run of the script with this ``t``."""
        self._t = t
        self._verbs = frozenset(name for action in actions_behind(t) for name in verbs_of(action))

    def changes(self) -> Iterator[Change]:
        """Yield the changes to try in other runs, from the last answer to the first."""
        firsts: dict[EngineAnswer, _Moment] = {}
        for answer, moment in self._found:
            firsts.setdefault(answer, moment)
        lasts = dict(self._found.keys())
        for answer in reversed(lasts):
            for moment in dict.fromkeys((lasts[answer], firsts[answer])):
                for how in self._found[answer, moment]:
                    yield Change(answer, how, moment)

    def read(self, owner: object, attribute: str) -> object:
        """Read an attribute for the script."""
        value = getattr(owner, attribute)
        if self._t is None or not self._belongs_to_engine(owner) or attribute in _GIVEN:
            return value
        if callable(value):
            return self._method(owner, attribute, value)
        if sys._getframe(2).f_code.co_name == "<lambda>":  # noqa: SLF001 - a condition that a wait asks
            self._awaited.add(id(owner))
        return self._forward(owner, attribute, value)

    def _method(self, owner: object, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: Any, **named: Any) -> object:
            if owner is self._t and name in self._verbs:
                self._verbs_called += 1
            if name == _WAIT_FOR_IDLE:
                self._idle_after = self._verbs_called
            if name in _WAITS_FOR_REQUESTS and arguments:
                handles = arguments[0] if isinstance(arguments[0], (list, tuple, set)) else arguments[:1]
                self._awaited.update(map(id, handles))
            result = method(*arguments, **named)
            if owner is self._t and self._belongs_to_engine(result) and not isinstance(result, BaseRequest):
                self._named.setdefault(id(result), (result, f"{name}({', '.join(map(repr, arguments))})"))
            return self._forward(owner, name, result)

        return functools.update_wrapper(called, method) if isinstance(method, types.FunctionType) else called

    def _forward(self, owner: object, attribute: str, value: object) -> object:
        assert self._t is not None, "a run has begun"
        moment = (self._t.run.step, self._verbs_called)
        if not moment[0]:  # nothing has happened yet that could have gone differently
            return value
        others = {how: other for how, other in self._others(owner, attribute, value) if other != value}
        answers = [
            EngineAnswer(name, attribute) for name in dict.fromkeys((type(owner).__name__, self._name_of(owner)))
        ]
        for answer in answers:
            self._found.setdefault((answer, moment), {}).update(dict.fromkeys(others))
        change = self._change
        if change is None or change.answer not in answers or moment < change.since:
            return value
        return others.get(change.how, value)

    def _others(self, owner: object, attribute: str, value: object) -> Iterator[tuple[str, object]]:
        for how, other in _others_of(attribute, value):
            if attribute in _LASTING and value is True and id(owner) in self._awaited:
                continue
            if attribute in _IDLE and value is True and self._idle_after == self._verbs_called:
                continue
            if isinstance(other, str) and other in self._absent_modes:
                continue
            most = getattr(owner, "total", None)
            if isinstance(most, int) and type(other) is int and other > most:
                continue
            yield how, other

    def _belongs_to_engine(self, owner: object) -> bool:
        kind = type(owner)
        if isinstance(owner, (type, types.ModuleType, enum.Enum, self._given)):
            return False
        return kind.__module__.partition(".")[0] in self._packages

    def _name_of(self, owner: object) -> str:
        kind = type(owner).__name__
        if id(owner) not in self._named:
            if not isinstance(owner, (BaseRequest, Call, ClientView)):
                return kind
            number = sum(type(one) is type(owner) for one, _ in self._named.values()) + 1
            self._named[id(owner)] = owner, f"{kind} {number}"
        return self._named[id(owner)][1]


def _others_of(attribute: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield other possible answers, each with a name."""
    if value is None:
        if attribute == "finish_reason":
            yield "there", "abort"
        elif attribute in _INSTEAD_OF_NONE:
            yield "there", _INSTEAD_OF_NONE[attribute]
    elif isinstance(value, bool):
        yield "not", not value
    elif isinstance(value, Status):
        yield "status", Status(200 if value != 200 else _REFUSED)
    elif isinstance(value, (int, float)):
        yield from _other_numbers(attribute, value)
    elif isinstance(value, Word) and attribute == "finish_reason":
        # One other end is enough: an assertion that admits most ends says little.
        word = "abort" if value.value == "length" else "length"
        yield from ((other.value, other) for other in value.others() if other.value == word)
    elif isinstance(value, Word):
        same = next((words for words in _SAME_END if value.value in words), None) if type(value) is Condition else None
        yield from ((other.value, other) for other in value.others() if same is None or other.value in same)
    elif isinstance(value, str):
        yield from (("none", ""), ("other", f"{value[::-1]}?"))
    elif isinstance(value, dict):
        yield from _other_values(attribute, value)
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        yield from _other_elements(attribute, value)


def _other_numbers(attribute: str, value: float) -> Iterator[tuple[str, object]]:
    yield from (("more", value + 1), ("many", 4 * value + _MANY))
    if attribute not in _GROWING and value > 0:
        yield from (("less", max(type(value)(0), value - 1)), ("none", type(value)(0)))


def _other_values(attribute: str, value: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    for how in dict.fromkeys(how for one in value.values() for how, _ in _others_of(attribute, one)):
        other = copy.copy(value)
        other.update({key: dict(_others_of(attribute, one)).get(how, one) for key, one in value.items()})
        yield how, other


def _other_elements(attribute: str, value: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, object]]:
    make: Any = type(value)
    if not value:
        if attribute in _FIRST_ELEMENTS:
            yield "more", make([_FIRST_ELEMENTS[attribute]])
        return
    yield from (("none", make(())), ("fewer", make(value[:-1])), ("more", make([*value, value[-1]])))
    if type(value[-1]) is int:
        yield "other", make([*value[:-1], value[-1] + (-1 if value[-1] else 1)])
