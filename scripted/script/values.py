"""Values that scripts compare: sequences equal to lists, words of a closed vocabulary, objects without a truth value.

A comparison that can only have one result raises at its line, because an assertion on it tests nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from scripted.core.errors import BadCall
from scripted.core.phrases import nearest

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Nameless:
    """Base class of objects that are always true and equal only to themselves: testing or comparing one raises.

    ``_ask`` names the attributes to ask instead.
    """

    _ask = "one of its attributes"

    def __bool__(self) -> bool:
        raise BadCall(f"{self!r} is always true, so asking it tests nothing; ask {self._ask}, or compare it with None")

    def __iter__(self) -> Iterator[object]:
        raise BadCall(f"{self!r} is neither a wait nor a sequence; write it without 'yield from', and ask {self._ask}")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, Nameless):
            return self is other
        raise BadCall(f"{self!r} is compared with {other!r}, which it can never be equal to; compare {self._ask}")

    __hash__ = object.__hash__


class Listed(tuple[T_co, ...]):
    """A tuple that equals a list of the same items, and refuses comparison with anything it can never equal."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return tuple.__contains__(self, _looked_for(self, item))

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def __ne__(self, other: object) -> bool:
        return not _same(self, other)

    __hash__ = tuple.__hash__


class ListedList(list[T]):
    """A list that equals a tuple of the same items; see ``Listed``."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return list.__contains__(self, _looked_for(self, item))

    def __eq__(self, other: object) -> bool:
        return _same(self, other)

    def __ne__(self, other: object) -> bool:
        return not _same(self, other)

    __hash__ = None


class Named(dict[str, T]):
    """Values by name; any other name raises BadCall with the nearest one."""

    def __init__(self, what: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self._what = what

    def __getitem__(self, name: str) -> T:
        return super().__getitem__(self._known(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._known(name))

    def __bool__(self) -> bool:
        raise BadCall(f"{self._what} always has {', '.join(self)}, so asking it tests nothing; ask one of them")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a known name; raises BadCall for any other, with or without a default."""
        return super().get(self._known(name), default)

    def _known(self, name: object) -> str:
        if isinstance(name, str) and name in self.keys():
            return name
        raise BadCall(f"{self._what} has {', '.join(self)}, and no {name!r}{nearest(str(name), self)}")


class Status(int):
    """An HTTP status: comparing it with a text, which it never equals, raises BadCall."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise BadCall(f"the status {int(self)} is a number; it can never be the text {other!r}")
        return int.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _looked_for(ours: Sequence[object], item: object) -> object:
    if isinstance(item, Nameless):
        raise BadCall(f"{item!r} is looked for among rids or numbers, where it can never be; look for its .rid")
    if ours and item is not None and ours[0] is not None and isinstance(item, str) is not isinstance(ours[0], str):
        kind = type(ours[0]).__name__
        raise BadCall(f"{item!r} is looked for among values of type {kind}, where it can never be; look into them")
    return item


def _same(ours: Sequence[object], other: object) -> bool:
    if isinstance(other, (list, tuple)):
        return tuple.__eq__(tuple(ours), tuple(other))
    if other is None:
        return False
    raise BadCall(
        f"{list(ours)} is compared with {other!r}, which it can never be equal to; compare it with a list or a tuple"
    )


class OneRid(str):
    """The rid of the one request that a query is about: it is no list of rids, and refuses to be used like one."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        raise BadCall(f"{item!r} is looked for in {str(self)!r}, the rid of one request; compare it with ==")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, set, frozenset)):
            raise BadCall(f"{str(self)!r} is the rid of one request; it can never be {other!r}: compare it with a rid")
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Word(str):
    """A word of a closed vocabulary: comparing it with any other word raises BadCall."""

    __slots__ = ("_known", "_what")
    _what: str
    _known: frozenset[str]

    def __new__(cls, word: str, what: str, known: frozenset[str]) -> Word:
        """Make the word ``word`` of ``known``, the possible words for ``what``."""
        self = super().__new__(cls, word)
        self._what, self._known = what, known
        return self

    def __reduce__(self) -> tuple[type[Word], tuple[str, str, frozenset[str]]]:
        return type(self), (self.value, self._what, self._known)

    @property
    def value(self) -> str:
        return str.__str__(self)

    def others(self) -> list[Word]:
        """Return the other words of the vocabulary."""
        return [type(self)(word, self._what, self._known) for word in sorted(self._known) if word != self.value]

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


class Condition(Word):
    """A word that is never empty, so that testing its truth raises."""

    __slots__ = ()

    def __bool__(self) -> bool:
        raise BadCall(f"a {self._what} is always true, so asking it tests nothing; compare it with one of its words")


class Among:
    """A container that finds a word by its hash and compares it with nothing, such as a set or a dict.

    A word is compared with each element, as in a list.
    """

    def __init__(self, container: Collection[object]) -> None:
        self._container = container

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Word) and item not in self._container:
            return any(item == one for one in self._container)
        return item in self._container
