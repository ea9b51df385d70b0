"""The one exception of the checks. The engine's own audit raises IntegrityError, which is the engine's."""

from __future__ import annotations


class Violation(AssertionError):
    """The engine broke a promise; the text says which."""
