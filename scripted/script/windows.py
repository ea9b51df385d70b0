"""Windows: the situations that a script names with ``t.sometimes``, and must have reached where it says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripted.core.phrases import nearest
from scripted.errors import BadCall
from scripted.script.asked import truth_of


def holds_in(name: str, condition: object, must_reach: Sequence[str]) -> bool:
    """Whether the window of this name is open. Raises BadCall for a name that ``must_reach``, if any, does not have."""
    if not name or not isinstance(name, str):
        raise BadCall(f"sometimes() takes a name that is not empty, got {name!r}")
    if must_reach and name not in must_reach:
        raise BadCall(
            f"sometimes() names {name!r}, which is not in must_reach{nearest(name, must_reach)}; "
            "add it there, so that a run that never sees it fails"
        )
    return truth_of(condition, f"the condition of {name!r}")


def check_reached(must_reach: Sequence[str], reached: Mapping[str, int]) -> None:
    """Raise AssertionError, as a script would, for windows that it had to see and never saw. ``reached`` are counts."""
    missed = [name for name in must_reach if not reached.get(name)]
    if missed:
        raise AssertionError(f"the script never reached {', '.join(map(repr, missed))}; reached: {dict(reached)}")
