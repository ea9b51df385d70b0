"""Deadlines: times in seconds, or None."""

from __future__ import annotations


def earliest(*deadlines: float | None) -> float | None:
    """The first of these deadlines; None when there is none."""
    return min([deadline for deadline in deadlines if deadline is not None], default=None)
