"""Copies of machines that this project did not write: everything that Python objects are made of."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
import types
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import pytest

from scripted.core.forks import Copier, Frozen
from scripted.core.refusals import HarnessError

Pair = collections.namedtuple("Pair", "left right")


class Colour(Enum):
    RED = (1,)


@dataclass(frozen=True)
class Sealed:
    items: list[int]


@dataclass(slots=True)
class Slotted:
    items: list[int] = field(default_factory=list)
    never_set: int = field(init=False)


class Both(Slotted):
    def __init__(self) -> None:
        super().__init__([1])
        self.extra = [2]


class Struct(msgspec.Struct, dict=True):
    items: list[int]
    count: int = 1


class FrozenStruct(msgspec.Struct, frozen=True):
    count: int = 1


class Queue(collections.deque):
    def __init__(self, *items: object) -> None:
        super().__init__(items)
        self.log = [0]


class Shared:
    def __init__(self) -> None:
        self.items = [1]


class Whole:
    def __init__(self) -> None:
        self.mixed = [1, [2], 3]
        self.pair = Pair([1], 2)
        self.sealed = Sealed([1])
        self.slotted = Slotted([1])
        self.both = Both()
        self.struct = Struct([1])
        self.struct.extra = [1]
        self.struct.plain = 1
        self.told = FrozenStruct()
        self.default = collections.defaultdict(list, a=[1])
        self.ordered = collections.OrderedDict(a=[1])
        self.queue = Queue([1], [2])
        self.counter = itertools.count(5)
        self.call = functools.partial(self.mixed.append, 9)
        self.method = self.touch
        self.of_sealed = {self.sealed.items[0]: self.sealed}
        self.key = Slotted([4])
        self.by_identity = dict.fromkeys((1, 2), self.key)
        self.colour = Colour.RED
        self.shared = Shared()
        self.me = self
        self.touched = 0

    def touch(self) -> None:
        self.touched += 1


@pytest.fixture
def two() -> tuple[Whole, Whole]:
    frozen = Frozen(Whole(), Copier(shared=(Shared,)))
    return frozen.thaw(), frozen.thaw()


@pytest.mark.parametrize(
    "path",
    [
        "mixed", "mixed[1]", "pair", "pair.left", "sealed", "sealed.items", "slotted", "slotted.items", "both.items",
        "both.extra", "struct", "struct.items", "struct.extra", "default", "default['a']", "ordered['a']",
        "queue", "queue[1]", "queue.log", "by_identity[1]",
    ],
)  # fmt: skip
def test_nothing_that_changes_is_in_two_copies(two: tuple[Whole, Whole], path: str) -> None:
    one, other = (eval(f"copy.{path}", {"copy": copy}) for copy in two)
    assert one is not other
    assert type(one) is type(other)


def test_what_refers_to_the_same_does_so_in_a_copy(two: tuple[Whole, Whole]) -> None:
    copy, other = two
    assert copy.me is copy
    assert copy.by_identity[1] is copy.by_identity[2] is copy.key
    assert copy.of_sealed[1] is copy.sealed
    copy.method()
    assert (copy.touched, other.touched) == (1, 0)
    copy.call()
    assert copy.mixed[-1] == 9
    assert other.mixed == [1, [2], 3]


def test_kinds_keep_what_makes_them_so(two: tuple[Whole, Whole]) -> None:
    copy, other = two
    assert copy.default["new"] == []
    assert "new" not in other.default
    assert (next(copy.counter), next(copy.counter), next(other.counter)) == (5, 6, 5)
    assert list(copy.queue) == [[1], [2]]
    assert not hasattr(copy.slotted, "never_set")
    with pytest.raises(AttributeError):
        copy.sealed.items = []  # type: ignore[misc]


def test_what_never_changes_is_shared(two: tuple[Whole, Whole]) -> None:
    copy, other = two
    assert copy.shared is other.shared
    assert copy.colour is Colour.RED
    assert copy.told is other.told


def test_a_struct_of_a_machine_is_its_own(two: tuple[Whole, Whole]) -> None:
    """SGLang counts the servers that have confirmed an abort in a struct, and a run believed those of another."""
    copy, other = two
    copy.struct.count = copy.struct.plain = 2
    assert (other.struct.count, other.struct.plain, other.struct.items) == (1, 1, [1])


class Remembers:
    """Has functions that were made with it, one of which knows itself, and random numbers."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.count = 0

        def note(value: int) -> None:
            self.seen.append(value)
            if value:
                note(value - 1)

        self.note = note
        self.counts = lambda: self.count
        self.rng = random.Random(7)
        self.names = types.SimpleNamespace(of=[])


def test_functions_that_remember_the_machine_remember_the_copy() -> None:
    """D10: one that wrote into the machine it was made with would have two runs share what they do."""
    original = Remembers()
    frozen = Frozen(original, Copier())
    first, second = frozen.thaw(), frozen.thaw()
    first.note(2)
    first.count = 5
    first.names.of.append(1)
    assert not second.names.of
    assert (first.seen, second.seen, original.seen) == ([2, 1, 0], [], [])
    assert (first.counts(), second.counts()) == (5, 0)
    assert first.rng.random() == second.rng.random() == original.rng.random()


class Opaque:
    """An object whose content a walk cannot see, as with a tensor's numbers."""

    def __init__(self, items: list[int]) -> None:
        HIDDEN[id(self)] = items

    def clone(self) -> Opaque:
        return Opaque([*HIDDEN[id(self)]])


HIDDEN: dict[int, list[int]] = {}


def test_a_class_is_copied_as_the_copier_was_told() -> None:
    whole = types.SimpleNamespace(one=Opaque([1]))
    whole.same = whole.one
    frozen = Frozen(whole, Copier(copied={Opaque: Opaque.clone}))
    HIDDEN[id(whole.one)].append(2)
    first, second = frozen.thaw(), frozen.thaw()
    assert first.one is first.same is not second.one
    HIDDEN[id(first.one)].append(3)
    assert HIDDEN[id(second.one)] == [1]


def test_what_cannot_be_copied_is_named() -> None:
    """D02: by its class, with the remedy."""
    original = Remembers()
    original.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        HarnessError, match=r"holds a _thread.lock, which cannot be copied .*give the adapter no copier"
    ):
        Frozen(original, Copier())
    assert Frozen(original, Copier(shared=[type(threading.Lock())])).thaw().lock is original.lock  # type: ignore[attr-defined]
