"""The gate of a script: the search's own, with a generator in place of a schedule.

Each step is composed, judged and at the end wound up as in a search. It knows no verb and no report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from scripted.core.action import Action
from scripted.core.run import STEPS_LIMIT, Run
from scripted.core.schedule import Schedule
from scripted.sdk.messages import Batch
from scripted.sdk.records import Record

__all__ = ["ScriptGate"]

# A script has its own budget of steps.
_NEVER: Final = 2**62


class ScriptGate(Run):
    """``go_on`` lets the script run to its next yield and says whether it got there; False when it has ended.

    ``plans`` are the batches by the step that launched them, as the pipeline understood them. ``script_error`` is what
    the script raised.
    """

    records: list[Record]

    def __init__(self, config: Any, of: str, go_on: Callable[[ScriptGate], bool]) -> None:
        super().__init__(Schedule(config, (), of), record=True, watch=self._resume)
        self.plans: dict[int, Batch] = {}
        self.script_error: BaseException | None = None
        self._go_on = go_on
        self._last_step = _NEVER
        self._steps_limit = _NEVER
        self._without_id: deque[list[str]] = deque()

    def act(self, action: Action) -> None:
        """Do it before the next step: at once to the world, and to the scheduler after the results of that step."""
        if action.is_control:
            action.apply(self)
        else:
            self.place(action)

    def call(self, action: Action) -> list[str]:
        """Make an administrative call; its id is appended to the list when it has arrived."""
        call_id: list[str] = []
        self._without_id.append(call_id)
        self.place(action)
        return call_id

    def new_call_id(self) -> str:
        """The calls of the script come in their order; those of the end have no list."""
        call_id = super().new_call_id()
        if self._without_id:
            self._without_id.popleft().append(call_id)
        return call_id

    @property
    def arrived(self) -> tuple[Action, ...]:
        """What no step has seen yet."""
        return tuple(placed.action for placed in self._after.get(self.step + 1, ()))

    @property
    def due_steps(self) -> dict[int, int]:
        """The step in which the result of each batch in flight is due, by id."""
        return self._results.due_steps()

    def _judge(self, stepped: Any) -> None:
        if stepped.microbatch is not None:
            self.plans[self.step] = self.device.understood or stepped.microbatch
        super()._judge(stepped)

    def _resume(self, gate: Run) -> None:
        del gate
        try:
            goes_on = self._go_on(self)
        except BaseException as exc:
            self.script_error = exc
            raise
        if not goes_on:
            # From here on it is the end of any schedule: what is open is settled, then everything is wound up.
            self.watch = None
            self._last_step = self.step
            self._steps_limit = self.step + STEPS_LIMIT
