"""Deadlines: times in seconds, or None."""

from __future__ import annotations


def earliest(*deadlines: float | None) -> float | None:
    """Return the first of these deadlines; None if there is none."""
    return min([deadline for deadline in deadlines if deadline is not None], default=None)
