"""Actions on the world, which every adapter has: holding and releasing results, advancing virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

import msgspec

from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.verb import Verb


class HoldResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold"):
    """Withholds results from its step on."""

    examples: ClassVar = ("hold",)
    needs_open: ClassVar[bool] = True
    is_extra: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"hold": "hold_results"}

    @staticmethod
    @verb
    def hold_results(t: Any) -> None:
        """Withhold every completion, from the next step on, until it is released."""
        t.run.act(HoldResults())

    def apply(self, run: RunLike) -> None:
        run.hold_results()

    def is_distinct(self, run: RunLike) -> bool:
        """Return whether a result is due now: otherwise a hold from the next step on withholds the same."""
        return run.results.is_due(run.step + 1)


class ReleaseResults(Action, frozen=True, kw_only=True, omit_defaults=True, tag="release"):
    """Releases the oldest ``count`` held results; without a count, releases all and ends the hold."""

    count: int | None = None

    examples: ClassVar = ("release", "release count=2")
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"release": "release_results"}

    @staticmethod
    @verb
    def release_results(t: Any, n: int | None = None) -> None:
        """Release the ``n`` oldest held completions; without ``n``, release all and end the hold."""
        t.check_released("release_results()", n)
        t.run.act(ReleaseResults(count=n))

    def apply(self, run: RunLike) -> None:
        run.release_results(self.count)

    def reaches(self, run: RunLike) -> bool:
        return run.is_holding


class AdvanceClock(Action, frozen=True, kw_only=True, omit_defaults=True, tag="advance"):
    """Advances virtual time."""

    seconds: Annotated[float, msgspec.Meta(ge=0)]

    examples: ClassVar = ("advance seconds=1.5",)
    is_control: ClassVar[bool] = True
    shell_words: ClassVar = {"advance": "clock.advance"}

    def apply(self, run: RunLike) -> None:
        run.clock.advance(self.seconds)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("clock.advance", self.seconds),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Generate advances to each time limit of the requests, and to half of it."""
        return [cls(seconds=part * limit) for limit in base.time_limits for part in (0.5, 1.0)]

    def smaller(self) -> Iterator[Action]:
        if self.seconds != int(self.seconds):
            yield AdvanceClock(seconds=float(int(self.seconds) + 1))
