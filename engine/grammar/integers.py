"""Keeps the integers of schemas exact, although the library reads every number as a double of 64 bits.

A bound becomes the nearest double that allows no further value; a constant that is no double cannot be followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

# Up to here every integer is a double. The library adds 1 to an exclusive bound, and misreads large ones with a point.
EXACT: Final = 2**53
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# The library's own integers; the lowest of them ends its process.
_LAST: Final = 2**63 - 1
_FIRST: Final = int(math.nextafter(-(2.0**63), 0))


def round_bounds(part: dict[str, Any]) -> bool:
    """Replace bounds that the library misreads by ones within them; False if no number remains."""
    types = part.get("type")
    if types != "integer" and not (isinstance(types, list) and "integer" in types and "number" not in types):
        _shorten(part)
        return True
    found = [part[name] for name in _BOUNDS if name in part]
    is_exact = all(isinstance(bound, int) and abs(bound) < EXACT for bound in found)
    if is_exact or any(_whole(bound) is None for bound in found):
        return True
    lowest = _stricter(part, "minimum", "exclusiveMinimum", 1)
    highest = _stricter(part, "maximum", "exclusiveMaximum", -1)
    for name in _BOUNDS:
        part.pop(name, None)
    if lowest is not None:
        part["minimum"] = lowest = max(_double_from(lowest), _FIRST)
    if highest is not None:
        part["maximum"] = highest = _LAST if highest >= _LAST else -_double_from(-highest)
    return (lowest is None or lowest <= _LAST) and (
        highest is None or highest >= (_FIRST if lowest is None else lowest)
    )


def _shorten(part: dict[str, Any]) -> None:
    """Move the bounds of other numbers to the ends of the library's integers."""
    for bounds, sign in ((("minimum", "exclusiveMinimum"), 1), (("maximum", "exclusiveMaximum"), -1)):
        for name in bounds:
            bound = _whole(part.get(name))
            if bound is not None and bound * sign < _FIRST:
                del part[name]
                part[bounds[0]] = _FIRST * sign


def _stricter(part: dict[str, Any], name: str, exclusive: str, step: int) -> int | None:
    """Return the stricter one of two integer bounds; None without a bound."""
    inside, outside = _whole(part.get(name)), _whole(part.get(exclusive))
    bounds = [inside] if inside is not None else []
    bounds += [outside + step] if outside is not None else []
    return max(bounds, key=lambda bound: bound * step, default=None)


def _whole(value: Any) -> int | None:
    """Return the integer that a number is; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _double_from(value: int) -> int:
    """Return the lowest integer from ``value`` on that is a double; far beyond the library's integers the value."""
    if abs(value) > 2 * _LAST:
        return value
    rounded = float(value)
    return int(rounded if int(rounded) >= value else math.nextafter(rounded, math.inf))


def is_writable(value: Any) -> bool:
    """Return whether the library reads a constant as it is."""
    return all(_FIRST <= number <= _LAST and int(float(number)) == number for number in _integers_of(value))


def drop_unwritable(part: dict[str, Any]) -> bool:
    """Drop constants that the library would misread from a schema; False if none of its values remains."""
    if not is_writable(part.get("const")):
        return False
    values = part.get("enum")
    if isinstance(values, list) and not is_writable(values):
        part["enum"] = [value for value in values if is_writable(value)]
        return bool(part["enum"])
    return True


def _integers_of(value: Any) -> Iterator[int]:
    open_parts = [value]
    while open_parts:
        one = open_parts.pop()
        if (number := _whole(one)) is not None and isinstance(one, int):
            yield number
        elif isinstance(one, dict):
            open_parts += one.values()
        elif isinstance(one, list):
            open_parts += one
