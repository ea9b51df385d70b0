"""Rewrites limits on the number of an object's properties as alternatives by which optional ones it has."""

from __future__ import annotations

import itertools
from typing import Any, Final

from engine.grammar.schema_ends import listed, named

MOST_ALTERNATIVES: Final = 64
_FORBIDDEN: Final = False


def count_properties(part: dict[str, Any]) -> None:
    """Replace ``minProperties`` and ``maxProperties`` where the library does not follow them."""
    fewest, most = part.get("minProperties", 0), part.get("maxProperties")
    required = {key for key in listed(part, "required") if isinstance(key, str)}
    optional = [key for key, one in named(part, "properties").items() if key not in required and one is not False]
    if not optional or not isinstance(fewest, int) or not isinstance(most, int | None):
        return
    if "minProperties" not in part and most is None:
        return
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    needed = max(0, fewest - len(required))
    left = len(optional) if most is None else most - len(required)
    chosen: list[dict[str, Any]] = []
    sizes = range(needed if is_closed else 0, min(len(optional), left) + 1)
    if is_closed and (most is None or left >= len(optional)):
        sizes = range(needed, min(needed, len(optional)) + 1)
    for some in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in sizes):
        absent = {} if is_closed and left >= len(optional) else {key: _FORBIDDEN for key in optional if key not in some}
        chosen.append({"required": list(some), "properties": absent} | ({} if is_closed else _limits(part)))
        if len(chosen) > MOST_ALTERNATIVES:
            return
    for name in ("minProperties", "maxProperties"):
        part.pop(name, None)
    kind = {"type": "object"} if part.get("type") == "object" else {}
    part["allOf"] = [*listed(part, "allOf"), {"anyOf": [kind | one for one in chosen]}]


def _limits(part: dict[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("minProperties", "maxProperties") if name in part}
