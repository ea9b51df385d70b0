"""Moves the targets of references into ``$defs``, where rewriting a schema leaves them in their place.

Generators refer to where a part stood first, as ``#/properties/a/anyOf/0``; of a rewritten schema such a pointer may
name nothing, or another part.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.grammar.schema_ends import PARTS_BY_NAME, named, target_in

# Targets that stay where they are.
_SETTLED: Final = re.compile(r"#|#/(?:\$defs|definitions)/[^/]*")
_NAMES: Final = frozenset((*PARTS_BY_NAME, "dependencies"))
# Their values are data.
_DATA: Final = frozenset(("const", "enum", "default", "example", "examples"))


def settled(root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with all targets of its local references in ``$defs`` or ``definitions``; itself if it is one."""
    moving = _Moving(root)
    found: dict[str, Any] = moving.part(root)
    if not moving.names:
        return root
    moved: dict[str, Any] = {}
    while len(moved) < len(moving.names):
        place = list(moving.names)[len(moved)]
        moved[moving.names[place]] = moving.part(moving.targets[place])
    found["$defs"] = named(found, "$defs") | moved
    return found


class _Moving:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._taken = named(root, "$defs").keys()
        # By pointer: the targets to move, and their new names.
        self.targets: dict[str, Any] = {}
        self.names: dict[str, str] = {}

    def part(self, part: Any) -> Any:
        """Return a copy of a schema, or of a list of them, whose references name the new places."""
        if isinstance(part, list):
            return [self.part(one) for one in part]
        if not isinstance(part, dict):
            return part
        copied: dict[str, Any] = {}
        for key, one in part.items():
            if key in _NAMES and isinstance(one, dict):
                copied[key] = {name: self.part(inner) for name, inner in one.items()}
            else:
                copied[key] = one if key in _DATA else self.part(one)
        reference = part.get("$ref")
        if isinstance(reference, str) and not _SETTLED.fullmatch(reference):
            target = target_in(self._root, part)
            if target is not None:
                copied["$ref"] = f"#/$defs/{self._name_of(*target)}"
        return copied

    def _name_of(self, place: str, target: Any) -> str:
        if place not in self.names:
            self.targets[place] = target
            name = f"part-{len(self.names)}"
            while name in self._taken:
                name += "-"
            self.names[place] = name
        return self.names[place]
