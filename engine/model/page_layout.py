"""The layout of a stage's page and the origin of its KV; two engines compare them before one sends pages to the other.

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

_REMEDY: Final = "; give both engines the same revision of the checkpoint, and the same --weights"


class KVOrigin(msgspec.Struct, frozen=True):
    """The model and the weights on which the KV of a prompt depends, besides its tokens.

    ``fields`` are those of the model's config.json that affect the computation, with their values as JSON, a long value
    as its digest. ``weights`` is a digest of the weights, with their type where it is not the checkpoint's.
    """

    fields: tuple[tuple[str, str], ...]
    weights: str

    def difference(self, other: KVOrigin) -> str:
        """Return the first difference, with both values and the remedy."""
        theirs, ours = dict(other.fields), dict(self.fields)
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                return _unlike(f"{name} of the model", theirs.get(name), ours.get(name)) + _REMEDY
        return _unlike("the weights of the model", other.weights, self.weights) + _REMEDY


class PageLayout(msgspec.Struct, frozen=True):
    """The parts of a stage's page; stages with equal layouts can exchange pages.

    ``origin`` is None where no model computes. ``parts`` are the element types and shapes of its KV. ``sanitizer_root``
    is the root of the slot record's fingerprints; None without them. ``image_bytes`` is the total size.
    """

    stage: int
    stages: int
    page_size: int
    origin: KVOrigin | None
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    sanitizer_root: int | None
    image_bytes: int

    def difference(self, other: PageLayout) -> str | None:
        """Return the first difference, with both values; None if they are equal."""
        if self == other:
            return None
        name = next(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))
        if name == "origin" and self.origin is not None and other.origin is not None:
            return self.origin.difference(other.origin)
        return _unlike(name, other._shown(name), self._shown(name))

    def _shown(self, name: str) -> str:
        if name != "parts":
            return repr(getattr(self, name))
        return ", ".join(f"{count} x {dtype} {shape}" for (dtype, shape), count in Counter(self.parts).items())


def _unlike(name: str, theirs: str | None, ours: str | None) -> str:
    return f"{name} must be the same on both engines, got {theirs} on the sender and {ours} on the receiver"
