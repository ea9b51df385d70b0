"""Other weights for a live engine: the action of a script, and what each request had computed with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from scripted.core.account import Account, Life
from scripted.core.action import verb
from scripted.core.errors import BadCall
from scripted.sdk.messages import Add, Event, Signal
from scripted.sdk.signals import SignalAction

WEIGHTS: Final = "weights"
VERSIONS: Final = (0, 1)


class UpdateWeights(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="weights"):
    """What is computed from now on is computed with these weights."""

    version: int

    examples: ClassVar = ("weights version=1",)

    @staticmethod
    @verb
    def update_weights(t: Any, version: int) -> None:
        """Load other weights, of version 0 or 1. Those of the engine's start are 0, and each script begins with them.

        The cache is kept: flush it, or what was computed before is used after.
        """
        if version not in VERSIONS:
            raise BadCall(f"update_weights() takes a version of {VERSIONS}, got {version!r}")
        UpdateWeights(version=version).tell(t)


# From which position on a request was computed with which weights.
History = tuple[tuple[int, int], ...]


class WeightsOfRequests:
    """Follows the events and plans of a run."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._version = VERSIONS[0]
        self._histories: dict[Life, list[tuple[int, int]]] = {}
        # Of requests that alone cannot do the same from then on, how much they had said.
        self._comparable: dict[Life, int] = {}

    def follow(self, event: Event) -> None:
        """Before the batch of its step is noted."""
        match event:
            case Add():
                self._histories[self._account.lives[-1]] = [(0, self._version)]
            case Signal() if event.name == WEIGHTS:
                self._version = event.value
                for life in self._account.live.values():
                    position = life.computed or 0
                    # A request alone comes to every position of its output, but not to those of its prompt.
                    if (life.said and not position) or 0 < position < len(life.message.prompt_ids):
                        self._comparable.setdefault(life, len(life.said))
                    self._histories[life].append((position, event.value))

    def lose_blocks(self, rids: Sequence[str]) -> None:
        """These compute again, with what weights there are now."""
        for rid in rids:
            life = self._account.live.get(rid)
            if life is not None and len({version for _, version in self._histories[life]}) > 1:
                self._comparable.setdefault(life, len(life.said))

    def history(self, life: Life) -> History:
        """The last version of each position."""
        return tuple(dict(self._histories[life]).items())

    def comparable(self, life: Life) -> int | None:
        """How many of its tokens are those that it says alone; None for all."""
        return self._comparable.get(life)
