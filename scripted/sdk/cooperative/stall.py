"""The action that stops a machine's threads between two of their own actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final

from scripted.core.action import Action, SearchBase, verb
from scripted.sdk.signals import SignalAction

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# The numbers of waits after which a search stalls the threads.
_DEPTHS: Final = 4


class Stall(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="stall"):
    """The threads stall in this step after ``after`` waits, locks included, and continue in the next step.

    The machine passes the value of the signal ``stall`` to ``Threads.stall``. Only this action shows a wake-up that is
    lost between a check and a wait.
    """

    after: int = 0

    examples: ClassVar = ("stall", "stall after=2")

    @staticmethod
    @verb
    def stall_threads(t: BaseContext, *, after: int = 0) -> None:
        """Stall the threads in the next step after this many waits."""
        Stall(after=after).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        del base
        return [cls(after=after) for after in range(_DEPTHS)]
