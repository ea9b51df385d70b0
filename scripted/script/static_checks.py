"""Checks on the conditions, calls and names that a script uses.

Refuses, at the script's line, conditions that are always true and calls that have no effect.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import FunctionType
from typing import Any, Final, NoReturn, TypeVar

from scripted.core.errors import BadCall, UnknownName
from scripted.core.phrases import nearest
from scripted.core.prompts import MOST_ITEMS
from scripted.script.values import Nameless

_Handle = TypeVar("_Handle")
# How many names a message lists if none is near.
_MOST_NAMED: Final = 6


class Method(Nameless):
    """A method of ``t``, which can only be called: testing or comparing the method itself raises."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        # Enough for help() and the signature; functools.wraps would take a third of an empty script's time.
        self.__wrapped__, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self._name = name
        self._function = function
        self._ask = f"what it returns: {name}(...)"

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        raise BadCall(f"{self!r} is compared with {other!r}, which says nothing of the engine; compare {self._ask}")

    __hash__ = Nameless.__hash__

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self._function(*args, **kwargs)
        except TypeError as exc:
            self._check_arguments(exc, args, kwargs)
            raise

    def _check_arguments(self, exc: TypeError, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise BadCall if the call does not fit the method."""
        signature = inspect.signature(self._function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as why:
            strange = [name for name in kwargs if name not in signature.parameters]
            guess = nearest(strange[0], signature.parameters) if strange else ""
            takes = ", ".join(signature.parameters) or "nothing"
            raise BadCall(f"{self._name}(): {why}{guess}; it takes {takes}") from exc

    def __iter__(self) -> NoReturn:
        raise BadCall(f"{self._name} is a method; call it: yield from {self._name}(...)")

    def __repr__(self) -> str:
        return f"the method {self._name}"


class Asked(Nameless):
    """Base class of ``t`` and its clock: methods cannot be used as values, and a wrong name gets the nearest one."""

    _ask = "one of its queries"
    _called = "t"

    def _seal(self) -> None:
        """Make public methods refuse to be used as values from now on."""
        kind: Any = type(self)
        for name, function in _methods_of(kind):
            self.__dict__[name] = Method(f"{self._called}.{name}", function.__get__(self))

    def __getattr__(self, name: str) -> Any:
        """Refuse an unknown name and suggest the nearest verb, which Python's own error cannot do.

        Verbs are added to the class at run time; this method also makes a type checker accept them.
        """
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        """Raise UnknownName; a subclass may explain a name."""
        known = [known for known in dir(type(self)) if not known.startswith("_")]
        there = f"; it has {', '.join(known)}" if len(known) <= _MOST_NAMED else ""
        raise UnknownName(f"{self._called} has no {name!r}{nearest(name, known) or there}")

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(self.__dict__.get(name), Method) and not callable(value):
            raise BadCall(f"{self._called}.{name} is a method and cannot be set to {value!r}; call it")
        if isinstance(getattr(type(self), name, None), property):
            raise BadCall(f"{self._called}.{name} is only to be read and cannot be set to {value!r:.80}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return self._called


@functools.cache
def _methods_of(kind: type) -> tuple[tuple[str, FunctionType], ...]:
    members = inspect.getmembers_static(kind, inspect.isfunction)
    return tuple((name, function) for name, function in members if not name.startswith("_"))


def truth_of(value: object, what: str) -> bool:
    """Return whether a condition holds. Raises BadCall for a value that is always true."""
    if isinstance(value, Nameless):
        return bool(value)
    if callable(value):
        name = getattr(value, "__qualname__", None) or repr(value)
        raise BadCall(f"{what} is the function {name}, which is always true until it is called; call it")
    if isinstance(value, Iterator) and not isinstance(value, Sized):
        raise BadCall(
            f"{what} is a {type(value).__name__}, which is always true; ask any(...), all(...) or list(...) of it"
        )
    return bool(value)


def bounded(call: str, name: str, values: Iterable[_Handle]) -> list[_Handle]:
    """Make a list of values. Raises BadCall for more than any argument needs, such as an endless iterator."""
    found = list(itertools.islice(values, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise BadCall(f"{call} takes at most {MOST_ITEMS} elements in {name}, got more; give it fewer")
    return found


def check_prompt_len(length: object) -> None:
    """Raise BadCall for anything but a possible length of a prompt in tokens."""
    if check_count("start_req()", "prompt_len", length) > MOST_ITEMS:
        raise BadCall(f"start_req() takes prompt_len <= {MOST_ITEMS}, more than any context, got {length}")


def check_count(call: str, name: str, value: object, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``. Raises BadCall for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadCall(f"{call} takes {name} >= {least}, a whole number, got {value!r}")
    return value


def check_predicate(predicate: object) -> None:
    """Raise BadCall for anything that ``run_until()`` cannot call without arguments after each step."""
    if not callable(predicate):
        raise BadCall(f"run_until() takes a function to call after each step, got {predicate!r}; write a lambda")
    try:
        inspect.signature(predicate).bind()
    except TypeError as exc:
        raise BadCall(f"run_until() calls its predicate without an argument, but: {exc}; write lambda: ...") from exc
    except ValueError:  # a builtin without a signature
        return


def several(handles: Iterable[_Handle], handle: type) -> list[_Handle]:
    """Return the handles for ``run_until_all_finished()``. Raises BadCall for a single handle, or none."""
    if isinstance(handles, handle) or not isinstance(handles, Iterable):
        raise BadCall(
            f"run_until_all_finished() takes several handles, got {handles!r}; write [r], or run_until_finished"
        )
    found = bounded("run_until_all_finished()", "its handles", handles)
    if not found:
        raise BadCall("run_until_all_finished() takes at least one handle, got none: it would wait for nothing")
    return found
