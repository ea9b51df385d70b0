"""A mutant: a small switch that puts a real engine's bug back, one condition at a time.

It is applied from the harness, in the process that runs the scheduler, and taken back afterwards; the engine's own code
holds no switch and no bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["GALLERY_TESTS", "Mutant"]

GALLERY_TESTS = "tests/registered/gallery"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug: ``owner.attribute`` becomes ``replacement``; the failure that this causes shows ``signature``."""

    name: str
    origin: str
    bug: str
    signature: str
    test: str
    owner: type | ModuleType
    attribute: str
    replacement: Any

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Put the bug in for as long as this is open."""
        original = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.replacement)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)
