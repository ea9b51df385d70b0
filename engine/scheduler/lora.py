"""One LoRA adapter as the scheduler knows it: its name, where its weights are, and whether the stages have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Lora:
    """``version`` is the number of the load that the stages hold, 0 while they hold none: it is not *resident* then.

    ``used`` is the number of the last microbatch with it, or of the first that could have it. One that
    is ``leaving`` is about to be unloaded, and no further request may ask for it.
    """

    name: str
    path: str
    version: int = 0
    used: int = -1
    leaving: bool = False

    def use(self, microbatch: int) -> int:
        """Note that a microbatch is computed with it; returns the version that the stages know it by."""
        assert self.version, f"{self} is not resident, but microbatch {microbatch} is to be computed with it"
        self.used = microbatch
        return self.version
