"""A digest chain without steps, for schedulers whose digest nobody reads."""

from __future__ import annotations

from typing import ClassVar

from engine.core.instruments import DigestChain


class SilentDigests(DigestChain):
    """A digest that ignores steps: hashing is a third of a simulated step, and a search never reads the digest.

    It has no hash object, which could not be copied with a fork.
    """

    keeps_steps: ClassVar[bool] = False

    def __init__(self) -> None:
        pass
