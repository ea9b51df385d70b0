"""The one exception of the checks, and whose code raised another one.

The engine's own audit raises IntegrityError, which is the engine's.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import NamedTuple

from scripted.core.installed import harness_packages


class Bounds(NamedTuple):
    """What a launch of this request had to keep: it begins at ``first`` or before, all is before ``end``, and ``last``
    is its last position.
    """

    rid: str
    first: int | None = None
    end: int | None = None
    last: int | None = None


class Violation(AssertionError):
    """The scheduler broke a promise; the text says which.

    ``bounds`` are those that the last launch exceeded; none of the requests ``left_out`` is in the last so many
    launches that it was counted for.
    """

    def __init__(self, text: str, *, bounds: Bounds | None = None, left_out: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.bounds = bounds
        self.left_out = left_out


def is_raised_in(exc: BaseException, packages: Collection[str]) -> bool:
    """Whether code of these packages raised it, itself or by a library that it called, and not the harness."""
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(exc.__traceback__)]
    known = harness_packages().union(packages)
    return next((name for name in reversed(names) if name in known), None) in packages
