"""What a script may ask, and how: conditions that can be false, methods that are called, names that exist.

Refuses, at the script's line, what is always true or has no effect.
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
# Names that a message lists when none is near.
_MOST_NAMED: Final = 6


class Method(Nameless):
    """A method of ``t``, to be called: asked or compared without a call it would only ever say that it exists."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        # For help and for the signature; all that functools.wraps copies takes a third of what an empty script does.
        self.__wrapped__, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self._name = name
        self._function = function

    @property
    def _ask(self) -> str:  # type: ignore[override]
        return f"what it returns: {self._name}(...)"

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
            raise BadCall(f"{self._name}(): {why}{guess}; it takes {_parameters(signature)}") from exc

    def __iter__(self) -> NoReturn:
        raise BadCall(f"{self._name} is a method; call it: yield from {self._name}(...)")

    def __repr__(self) -> str:
        return f"the method {self._name}"


class Asked(Nameless):
    """Base of ``t`` and its clock: public methods know that they are methods, and a wrong name gets the nearest one."""

    _ask = "one of its queries"
    _called = "t"

    def _seal(self) -> None:
        """From now on public methods refuse to be used as values."""
        kind: Any = type(self)
        for name, function in _methods_of(kind):
            self.__dict__[name] = Method(f"{self._called}.{name}", function.__get__(self))

    def __getattr__(self, name: str) -> Any:
        """Refuse a name that there is not, and name the nearest verb, which Python's own error does not know.

        Verbs are put on the class at run time, so that a type checker takes any name from here.
        """
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        """Raises UnknownName; a subclass may say more of a name."""
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
    """Whether a condition holds. Raises BadCall for a value that can only ever be true."""
    if isinstance(value, Nameless):
        return bool(value)
    if callable(value):
        raise BadCall(f"{what} is {_name_of(value)}, which is always true until it is called; call it")
    if isinstance(value, Iterator) and not isinstance(value, Sized):
        raise BadCall(
            f"{what} is a {type(value).__name__}, which is always true; ask any(...), all(...) or list(...) of it"
        )
    return bool(value)


def bounded(call: str, name: str, values: Iterable[_Handle]) -> list[_Handle]:
    """The values as a list. Raises BadCall for more than any argument needs, such as an iterator without an end."""
    found = list(itertools.islice(values, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise BadCall(f"{call} takes at most {MOST_ITEMS} elements in {name}, got more; give it fewer")
    return found


def check_prompt_len(length: object) -> None:
    """Raise BadCall for what is no number of tokens that a prompt may have."""
    if check_count("start_req()", "prompt_len", length) > MOST_ITEMS:
        raise BadCall(f"start_req() takes prompt_len <= {MOST_ITEMS}, more than any context, got {length}")


def check_count(call: str, name: str, value: object) -> int:
    """The value, a whole number of at least 1. Raises BadCall for any other."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadCall(f"{call} takes {name} >= 1, a whole number, got {value!r}")
    return value


def check_predicate(predicate: object) -> None:
    """Raise BadCall for what ``run_until()`` cannot ask after each step, without an argument."""
    if not callable(predicate):
        raise BadCall(f"run_until() takes a function that is asked after each step, got {predicate!r}; write a lambda")
    try:
        inspect.signature(predicate).bind()
    except TypeError as exc:
        raise BadCall(f"run_until() asks its predicate without an argument, but: {exc}; write lambda: ...") from exc
    except ValueError:  # a builtin that does not say what it takes
        return


def several(handles: Iterable[_Handle], handle: type) -> list[_Handle]:
    """What ``run_until_all_finished()`` waits for. Raises BadCall for one handle, and for none."""
    if isinstance(handles, handle) or not isinstance(handles, Iterable):
        raise BadCall(
            f"run_until_all_finished() takes several handles, got {handles!r}; write [r], or run_until_finished"
        )
    found = bounded("run_until_all_finished()", "its handles", handles)
    if not found:
        raise BadCall("run_until_all_finished() takes at least one handle, got none: it would wait for nothing")
    return found


def _parameters(signature: inspect.Signature) -> str:
    return ", ".join(signature.parameters) or "nothing"


def _name_of(value: object) -> str:
    return f"the function {getattr(value, '__qualname__', None) or repr(value)}"
