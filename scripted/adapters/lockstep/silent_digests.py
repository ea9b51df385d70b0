"""A digest chain that keeps nothing: hashing is a third of a simulated step, and a search never asks for the digest."""

from __future__ import annotations

from typing import ClassVar

from engine.instruments import DigestChain


class SilentDigests(DigestChain):
    """Is given no steps. It has no hash, which could not be copied with a fork."""

    keeps_steps: ClassVar[bool] = False

    def __init__(self) -> None:
        pass
