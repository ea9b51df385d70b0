"""Recognizes closing tags that a model has damaged."""

from __future__ import annotations

import functools
from typing import Final

# The maximum number of wrong, missing or extra characters in a tag.
MOST_DAMAGE: Final = 2
# A tag that is truncated to less than this could be any tag.
SHORTEST_CUT_TAG: Final = 5


@functools.lru_cache(maxsize=1024)
def is_closer(tag: str, closer: str, markers: tuple[str, ...] = ()) -> bool:
    """Return whether a tag is this closing tag, intact or damaged. ``markers`` are other tags, which look similar."""
    if tag == closer:
        return True
    seen = "".join(tag.split())
    if len(seen) < SHORTEST_CUT_TAG or any(seen.startswith(marker) for marker in markers if marker != closer):
        return False
    # Truncated, or followed by the slash of an empty element, a digit or another tag's name.
    if closer.startswith(seen) or seen.startswith(closer[:-1]):
        return True
    return abs(len(seen) - len(closer)) <= MOST_DAMAGE and _is_near(seen, closer)


def _is_near(one: str, other: str) -> bool:
    """Return whether the Levenshtein distance is at most ``MOST_DAMAGE``."""
    row = list(range(len(other) + 1))
    for at, character in enumerate(one, 1):
        last, row[0] = row[0], at
        for place, wanted in enumerate(other, 1):
            changed = last + (character != wanted)
            last = row[place]
            row[place] = min(changed, last + 1, row[place - 1] + 1)
        if min(row) > MOST_DAMAGE:
            return False
    return row[-1] <= MOST_DAMAGE
