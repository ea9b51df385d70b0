"""Rewrites ``contains`` of lists as alternatives by the places of the items that it counts.

Only the first places are tried: a list of any length must have the items that it needs among them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

# The places to try, and the alternatives: each costs the library states, the more the larger the items are.
MOST_PLACES: Final = 16
MOST_ALTERNATIVES: Final = 64
_MOST_CHARS: Final = 200
_OF_LARGE_ITEMS: Final = 4


def count_contained(part: dict[str, Any], wanted: Any, negated: Callable[[], Any]) -> None:
    """Replace ``contains`` and its limits; ``wanted`` is the schema to count, ``negated`` returns its negation.

    Leaves them if the negation is needed and cannot be written.
    """
    fewest, most = part.get("minContains", 1), part.get("maxContains")
    share = 1 if len(json.dumps([wanted, part.get("items")])) <= _MOST_CHARS else _OF_LARGE_ITEMS
    longest = part.get("maxItems", MOST_PLACES + part.get("minItems", 0))
    if not all(isinstance(one, int) for one in (fewest, longest, 0 if most is None else most)):
        return
    other = {} if most is None else negated()
    if other is False and (most is None or wanted not in (True, {})):
        return
    for name in ("contains", "minContains", "maxContains"):
        part.pop(name, None)
    if most is None and not fewest:
        return
    if isinstance(part.get("minItems", 0), int):
        part["minItems"] = max(fewest, part.get("minItems", 0))
    highest = fewest if most is None else min(most, longest)
    chosen = _chosen_places(fewest, highest, min(longest, MOST_PLACES // share + fewest), MOST_ALTERNATIVES // share)
    kind = {"type": "array"} if part.get("type") == "array" else {}
    alternatives = [kind | _with_places(places, wanted, other, is_limited=most is not None) for places in chosen]
    part["allOf"] = [*(part["allOf"] if isinstance(part.get("allOf"), list) else []), {"anyOf": alternatives}]


def _chosen_places(fewest: int, most: int, length: int, count: int) -> list[tuple[int, ...]]:
    """Return at most ``count`` sets of places, of as many of the first places as possible."""
    for tried in range(length, fewest - 1, -1):
        chosen = list(itertools.islice(_combinations(fewest, most, tried), count + 1))
        if len(chosen) <= count:
            return chosen
    return []


def _combinations(fewest: int, most: int, length: int) -> Iterator[tuple[int, ...]]:
    for size in range(fewest, min(most, length) + 1):
        yield from itertools.combinations(range(length), size)


def _with_places(places: tuple[int, ...], wanted: Any, other: Any, *, is_limited: bool) -> dict[str, Any]:
    first = [wanted if place in places else other for place in range(max(places, default=-1) + 1)]
    return {"prefixItems": first, "minItems": len(first)} | ({"items": other} if is_limited else {})
