"""Other weights for a live engine: a script's action, and the weights that computed each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from scripted.core.account import Account, Life
from scripted.core.action import Culprit, verb
from scripted.core.errors import BadCall
from scripted.sdk.messages import Add, Event, Signal
from scripted.sdk.signals import SignalAction

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

WEIGHTS: Final = "weights"
VERSIONS: Final = (0, 1)


class UpdateWeights(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="weights"):
    """Loads other weights, which compute everything from now on."""

    version: int

    examples: ClassVar = ("weights version=1",)
    caused_by: ClassVar[Culprit] = Culprit.OPERATOR

    @staticmethod
    @verb
    def update_weights(t: BaseContext, version: int) -> None:
        """Load other weights, of version 0 or 1. Each script begins with version 0.

        The cache is kept: flush it, or the new weights use old KV.
        """
        if version not in VERSIONS:
            raise BadCall(f"update_weights() takes a version of {VERSIONS}, got {version!r}")
        UpdateWeights(version=version).tell(t)


# The weights of a request's positions, by first position.
History = tuple[tuple[int, int], ...]


class WeightsOfRequests:
    """Follows the events and plans of a run."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._version = VERSIONS[0]
        self._histories: dict[Life, list[tuple[int, int]]] = {}
        # By request: the output length beyond which the output cannot be compared with a run alone.
        self._comparable: dict[Life, int] = {}

    def follow(self, event: Event) -> None:
        """Follow a step's events before its batch is noted."""
        match event:
            case Add():
                self._histories[self._account.lives[-1]] = [(0, self._version)]
            case Signal() if event.name == WEIGHTS:
                self._version = event.value
                for life in self._account.live.values():
                    position = life.computed or 0
                    # Run alone, a request computes its output position by position, but not its prompt.
                    if (life.said and not position) or 0 < position < len(life.message.prompt_ids):
                        self._comparable.setdefault(life, len(life.said))
                    self._histories[life].append((position, event.value))

    def lose_blocks(self, rids: Sequence[str]) -> None:
        """Note requests that compute again, with the current weights."""
        for rid in rids:
            life = self._account.live.get(rid)
            if life is not None and len({version for _, version in self._histories[life]}) > 1:
                self._comparable.setdefault(life, len(life.said))

    def history(self, life: Life) -> History:
        """Return the last version of each position."""
        return tuple(dict(self._histories[life]).items())

    def comparable(self, life: Life) -> int | None:
        """Return how many of the request's tokens a run alone must repeat; None for all."""
        return self._comparable.get(life)
