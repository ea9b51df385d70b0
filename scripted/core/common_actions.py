"""Actions on the world, which every adapter knows: results that are held and released, and virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.verb import Verb


class HoldResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold"):
    """Results stay away from this step on."""

    examples: ClassVar = ("hold",)
    needs_open: ClassVar[bool] = True
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"hold": "hold_results"}

    @staticmethod
    @verb
    def hold_results(t: Any) -> None:
        """From the next step on, keep every completion back until it is released."""
        t.run.act(HoldResults())

    def apply(self, run: RunLike) -> None:
        run.hold_results()


class ReleaseResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """``count`` held results may come, oldest first; without a count all of them, and nothing is held any more."""

    count: int | None = None

    examples: ClassVar = ("release", "release count=2")
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"release": "release_results"}

    @staticmethod
    @verb
    def release_results(t: Any, n: int | None = None) -> None:
        """Let ``n`` held completions through, oldest first, or all of them and stop holding."""
        t.check_released("release_results()", n)
        t.run.act(ReleaseResults(count=n))

    def apply(self, run: RunLike) -> None:
        run.release_results(self.count)

    def reaches(self, run: RunLike) -> bool:
        return run.is_holding


class AdvanceClock(Action, frozen=True, kw_only=True, omit_defaults=True, tag="advance"):
    """Virtual time moves."""

    seconds: float

    examples: ClassVar = ("advance seconds=1.5",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"advance": "clock.advance"}

    def apply(self, run: RunLike) -> None:
        run.clock.advance(self.seconds)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("clock.advance", self.seconds),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Where requests have time limits: to the end of each, and not quite."""
        return [cls(seconds=part * limit) for limit in base.time_limits for part in (0.5, 1.0)]

    def smaller(self) -> Iterator[Action]:
        if self.seconds != int(self.seconds):
            yield AdvanceClock(seconds=float(int(self.seconds) + 1))
