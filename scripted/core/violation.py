"""The exception of all checks, and the attribution of other exceptions to the scheduler or the harness.

An engine's own audits raise exceptions of their own, such as IntegrityError.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import NamedTuple

from scripted.core.installed import harness_packages


class Bounds(NamedTuple):
    """The bounds that a launch of one request has to keep.

    It starts at ``first`` or before, stays below ``end``, and ends at ``last``.
    """

    rid: str
    first: int | None = None
    end: int | None = None
    last: int | None = None


class Violation(AssertionError):
    """The scheduler broke a promise, which the text names.

    ``bounds``: the bounds that the last launch exceeded. ``left_out``: the requests that waited although the last
    launches had room for them. ``inner``: the violation of one machine that a fleet reports with that machine's name.
    """

    def __init__(
        self, text: str, *, bounds: Bounds | None = None, left_out: Sequence[str] = (), inner: Violation | None = None
    ) -> None:
        super().__init__(text)
        self.inner = inner
        self.bounds = bounds
        self.left_out = left_out


def is_raised_in(exc: BaseException, packages: Collection[str]) -> bool:
    """Return whether these packages raised it, directly or through a library, rather than the harness."""
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(exc.__traceback__)]
    known = harness_packages().union(packages)
    return next((name for name in reversed(names) if name in known), None) in packages
