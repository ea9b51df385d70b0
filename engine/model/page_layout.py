"""The layout of a stage's page; two engines compare layouts before one sends pages to the other. Imports no torch."""

from __future__ import annotations

from collections import Counter

import msgspec


class PageLayout(msgspec.Struct, frozen=True):
    """The parts of a stage's page; stages with equal layouts can exchange pages.

    ``parts`` are the element types and shapes of its KV. ``sanitizer_root`` is the root of the slot record's
    fingerprints; None without them. ``image_bytes`` is the total size.
    """

    stage: int
    stages: int
    page_size: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    sanitizer_root: int | None
    image_bytes: int

    def difference(self, other: PageLayout) -> str | None:
        """Return the first difference, with both values; None if they are equal."""
        if self == other:
            return None
        name = next(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))
        theirs, ours = other._shown(name), self._shown(name)
        return f"{name} must be the same on both engines, got {theirs} on the sender and {ours} on the receiver"

    def _shown(self, name: str) -> str:
        if name != "parts":
            return repr(getattr(self, name))
        return ", ".join(f"{count} x {dtype} {shape}" for (dtype, shape), count in Counter(self.parts).items())
