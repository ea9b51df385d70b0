"""Cuts a list of timed items into parts of nearly equal length: longest processing time first (Graham 1969).

Depends on the items alone, never on the order they come in, so that every machine of a matrix cuts alike.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def partition(
    items: Iterable[T], parts: int, *, seconds: Callable[[T], float], name: Callable[[T], str]
) -> tuple[tuple[T, ...], ...]:
    """Return `parts` tuples, each sorted by name. Equal times go by name, equal loads to the part with fewer items."""
    if parts < 1:
        raise ValueError(f"parts must be >= 1, got {parts}; use 1 for no partition")
    loads = [0.0] * parts
    cut: list[list[T]] = [[] for _ in range(parts)]
    for item in sorted(items, key=lambda item: (-seconds(item), name(item))):
        shortest = min(range(parts), key=lambda index: (loads[index], len(cut[index]), index))
        loads[shortest] += seconds(item)
        cut[shortest].append(item)
    return tuple(tuple(sorted(part, key=name)) for part in cut)
