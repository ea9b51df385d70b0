"""``t`` on an adapter of the SDK: a verb that its scheduler does not declare is refused by name."""

from __future__ import annotations

from typing import Any, Final

from scripted.core.action import verbs_of
from scripted.errors import BadCall
from scripted.script.context import BaseContext
from scripted.script.state import MicrobatchInFlight
from scripted.sdk.actions import ACTIONS

_VERBS: Final = tuple(name for action in ACTIONS for name in verbs_of(action))


class SdkContext(BaseContext):
    """What a script drives the scheduler of an adapter with."""

    @property
    def last_batch(self) -> MicrobatchInFlight | None:
        """What the last step launched; None when it launched nothing."""
        last: MicrobatchInFlight | None = self._run.batch_of_step(self._run.step)
        return last

    def __getattr__(self, name: str) -> Any:
        if name in _VERBS:
            declared = [verb for verb in _VERBS if hasattr(type(self), verb)]
            raise BadCall(
                f"t.{name}() is no verb of {self._run.adapter.name} in this configuration, which declares "
                f"{', '.join(declared)}; its adapter says in Capabilities what it can do"
            )
        return super().__getattr__(name)
