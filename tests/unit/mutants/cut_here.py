"""Functions of every kind for the mutants of test_mutant.py to cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator


class Base:
    def name(self) -> str:
        return "base"


class Kinds(Base):
    __secret = 1

    def name(self) -> str:
        return super().name() + "!"

    def private(self) -> int:
        return self.__secret + len(Kinds.__name__)

    @property
    def size(self) -> int:
        return 1

    @functools.cached_property
    def once(self) -> int:
        return 1

    @staticmethod
    def fixed(number: int = 2) -> int:
        return number

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        yield 1

    def numbers(self) -> Iterator[int]:
        yield from range(3)

    def raises(self, first: int, second: int) -> int:
        total = first
        total += second
        assert total == 3, "a line below the cut"
        return total

    def positive(self, number: int) -> int:
        if number < 0:
            return 0
        return number


def down(number: int) -> list[int]:
    return [number, *down(number - 1)] if number else []


def _adder(step: int) -> Callable[[int], int]:
    def add(number: int) -> int:
        return number + step

    return add


add_two = _adder(2)
thrice = lambda number: number * 3  # noqa: E731 - one of the kinds that cannot be cut
