"""Values that scripts compare: sequences equal to lists, words of a closed vocabulary, things without a truth value.

A comparison that can only come out one way is refused where it is written, because an assertion on it tests nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from scripted.errors import BadCall
from scripted.phrases import nearest

__all__ = ["Listed", "ListedList", "Nameless", "Word"]

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Nameless:
    """Base of what is always true and equal to nothing but itself: asking or comparing it says nothing, so it raises.

    ``_ask`` names the questions that it can answer.
    """

    _ask = "one of its attributes"

    def __bool__(self) -> bool:
        raise BadCall(f"{self!r} is always true, so asking it tests nothing; ask {self._ask}, or compare it with None")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, Nameless):
            return self is other
        raise BadCall(f"{self!r} is compared with {other!r}, which it can never be equal to; compare {self._ask}")

    __hash__ = object.__hash__


class Listed(tuple[T_co, ...]):
    """A tuple that is equal to a list of the same things, and refuses to be compared with what it can never be."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return tuple.__contains__(self, _looked_for(item))

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def __ne__(self, other: object) -> bool:
        return not _same(self, other)

    __hash__ = tuple.__hash__


class ListedList(list[T]):
    """A list that is equal to a tuple of the same things; see ``Listed``."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return list.__contains__(self, _looked_for(item))

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def __ne__(self, other: object) -> bool:
        return not _same(self, other)

    __hash__ = None


def _looked_for(item: object) -> object:
    if isinstance(item, Nameless):
        raise BadCall(f"{item!r} is looked for among rids or numbers, where it can never be; look for its .rid")
    return item


def _same(ours: Sequence[Any], other: object) -> bool:
    if isinstance(other, (list, tuple)):
        return tuple.__eq__(tuple(ours), tuple(other))
    if other is None:
        return False
    raise BadCall(
        f"{list(ours)} is compared with {other!r}, which it can never be equal to; compare it with a list or a tuple"
    )


class Word(str):
    """A word of a closed vocabulary: comparing it with a word that it can never be raises BadCall."""

    __slots__ = ("_known", "_what")
    _what: str
    _known: frozenset[str]

    def __new__(cls, word: str, what: str, known: frozenset[str]) -> Word:
        """``word``, which is the present one of ``known``, the words of ``what``."""
        self = super().__new__(cls, word)
        self._what, self._known = what, known
        return self

    @property
    def value(self) -> str:
        """The word as plain text."""
        return str.__str__(self)

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        if isinstance(other, str) and (str.__eq__(self, other) or str.__str__(other) in self._known):
            return str.__eq__(self, other)
        guess = nearest(str(other), self._known) if isinstance(other, str) else ""
        raise BadCall(f"{self._what} is one of {', '.join(sorted(self._known))}; it can never be {other!r}{guess}")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__
