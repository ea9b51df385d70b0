"""A wait of a script: steps that run until something holds, used as ``yield from``. It knows nothing to wait for."""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType
from typing import Final

from scripted.core.errors import BadCall
from scripted.script.values import Nameless

DEFAULT_BUDGET_STEPS: Final = 400

# What to do about a wait whose yields reach nobody.
HAND_ON: Final = "use a wait as 'yield from', or yield once for each of its yields"
Steps = Generator[None, None, None]


class Wait(Nameless):
    """A wait that was made and has to be run with ``yield from``; one that was not is an error of the script."""

    _ask = "what it waits for"

    def __init__(self, what: str, generator: Steps) -> None:
        self.what = what
        self.generator = generator
        self.used = False

    def __iter__(self) -> Steps:
        if self.used:
            raise BadCall(f"t.{self.what} was run before and does nothing the second time; make another wait")
        self.used = True
        return self.generator

    def __repr__(self) -> str:
        return f"<{self.what}>"


def words_of_yielded(value: object) -> str:
    """What a script yielded, and what it should have."""
    if isinstance(value, Wait):
        return f"t.{value.what}; write 'yield from t.{value.what}'"
    if isinstance(value, GeneratorType):
        return f"the generator {value.__name__}; write 'yield from {value.__name__}(...)'"
    return f"{value!r}; write 'yield' alone, which lets one step run"
