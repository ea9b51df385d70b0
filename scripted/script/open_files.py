"""The open files of a process that a script may close: copies of its descriptors, and its standard streams."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Final

STANDARD_FILES: Final = (0, 1, 2)
# Not what a script may call: that refuses what is to be put back here.
_dup2: Final = os.dup2
# Libraries open a few when they are first used.
_MOST_NEW_DESCRIPTORS: Final = 16
# What scripts have left open, and the collector may close under a later one.
_left_open: Final[dict[int, tuple[int, int]]] = {}


class Descriptors:
    """Open descriptors, all or ``only`` some, each with a copy: one that a script closes or replaces is put back."""

    def __init__(self, only: Sequence[int] | None = None) -> None:
        self._counts_new = only is None
        before = {}
        self._open = _open_descriptors()
        for number in self._open if only is None else only:
            with contextlib.suppress(OSError):  # one was that of the folder itself
                identity = _identity(number)
                if _left_open.get(number) != identity:
                    before[number] = identity
        self._copies = {number: (identity, os.dup(number)) for number, identity in before.items()}
        self._close, self._closerange, self._dup2 = os.close, os.closerange, os.dup2

    def close_one(self, fd: int) -> None:
        """As ``os.close``; what closes all that it can reach does not reach the copies."""
        self._require_no_copy(fd)
        self._close(fd)

    def duplicate(self, fd: int, fd2: int, inheritable: bool = True) -> int:
        """As ``os.dup2``, but not over a copy, nor over what a thread of the test session may be reading."""
        if fd2 in self._open and fd2 not in STANDARD_FILES:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._require_no_copy(fd2)
        return self._dup2(fd, fd2, inheritable)

    def _require_no_copy(self, fd: int) -> None:
        if any(fd == duplicate for _identity, duplicate in self._copies.values()):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def close_range(self, fd_low: int, fd_high: int, /) -> None:
        """As ``os.closerange``, without the copies."""
        kept = sorted(one for _identity, one in self._copies.values() if fd_low <= one < fd_high)
        for first, end in itertools.pairwise([fd_low - 1, *kept, fd_high]):
            self._closerange(first + 1, end)

    def put_back(self) -> list[str]:
        """Close the copies; says which descriptors were closed or replaced. Idempotent."""
        changes = []
        copies, self._copies = self._copies, {}
        for number, (before, duplicate) in copies.items():
            try:
                now = _identity(number)
            except OSError:
                now = None
            if now != before:
                _dup2(duplicate, number, inheritable=number in STANDARD_FILES)
                changes.append(f"descriptor {number} was closed or replaced")
            os.close(duplicate)
        new = (
            set(_open_descriptors()) - {*copies, *self._open} - {duplicate for _identity, duplicate in copies.values()}
        )
        if self._counts_new:
            for number in new:
                with contextlib.suppress(OSError):
                    _left_open[number] = _identity(number)
        if copies and self._counts_new and len(new) > _MOST_NEW_DESCRIPTORS:
            changes.append(f"{len(new)} descriptors are open that were not")
        return changes


class Streams:
    """Keeps ``sys.stdout`` and its like open: one that is closed cannot be opened again, and others write to it."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._kept = []
        for name in ("stdin", "stdout", "stderr"):
            stream = getattr(sys, name)
            with contextlib.suppress(AttributeError, TypeError):
                stream.close = functools.partial(self._closed.append, f"sys.{name} was closed")
                self._kept.append(stream)

    def put_back(self) -> list[str]:
        """Give the streams their own way to be closed; says which were. Idempotent."""
        kept, self._kept = self._kept, []
        for stream in kept:
            with contextlib.suppress(AttributeError):
                del stream.close
        return self._closed


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - no path is needed of them
    except OSError:
        return list(STANDARD_FILES)


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino
