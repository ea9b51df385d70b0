"""A digest chain that keeps nothing: hashing is a third of a simulated step, and a search never asks for the digest."""

from __future__ import annotations

from typing import Any

from engine.instruments import DigestChain

__all__ = ["SilentDigests"]


class SilentDigests(DigestChain):
    """Takes steps and forgets them. It has no hash, which could not be copied with a fork."""

    def __init__(self) -> None:
        pass

    def add(self, entry: Any) -> None:
        """Forget a step."""

    def add_quiet(self) -> None:
        """Forget a step in which nothing happened."""
