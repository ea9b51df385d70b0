"""Deferrable calls of the executable specification: flush, weight update, profile, sleep.

Names in bold are the rules of docs/rules.md. This module knows no requests.
"""

from __future__ import annotations

from typing import Any

from engine.core.messages import FlushCache, Sleep, StartProfile, StopProfile, UpdateWeights, Wake
from engine.core.plan import ForwardMode
from scripted_lockstep.specification.grammars import SpecifiedGrammars
from scripted_lockstep.specification.memory import SpecifiedMemory

# A call, whether it was carried out, the text of its answer, and the answer's other fields as pairs.
Answer = tuple[Any, ...]


class SpecifiedCalls:
    """Tracks deferrable calls.

    The deferred call fails at ``deadline``. ``update`` is the weight update that is due or in flight, ``sleep_calls``
    are the pending sleeps and wakes. ``is_profiling``: the stages record a profile. The argument ``busy`` says why the
    engine is not quiescent; it is empty if the engine is.
    """

    def __init__(self, memory: SpecifiedMemory, grammars: SpecifiedGrammars, totals: dict[str, int]) -> None:
        self._memory = memory
        self._totals = totals
        self._grammars = grammars
        self._deferred: FlushCache | UpdateWeights | None = None
        self.deadline: float | None = None
        self.update: UpdateWeights | None = None
        self._profile: StartProfile | StopProfile | None = None  # the unanswered call
        self._is_launched = self.is_profiling = False
        self.weights: list[str | None] = [None]  # by version
        self.sleep_calls: list[Sleep | Wake] = []
        self.sleep_level = 0

    def ask(self, call: Any, now: float, busy: str) -> list[Answer]:
        """**Deferred**: carry out a call now, refuse it, or defer it until the engine is quiescent; one may wait."""
        if isinstance(call, StartProfile | StopProfile):
            return self._ask_profile(call)
        if isinstance(call, Sleep | Wake):
            return self._ask_sleep(call)
        if not busy:
            return self._do(call)
        if call.timeout_s is None or self._deferred is not None:
            return [(call, False, busy if call.timeout_s is None else "")]
        self._deferred, self.deadline = call, now + call.timeout_s
        return []

    def due(self, now: float, busy: str) -> list[Answer]:
        """**Deferred**: answer the deferred call once the engine is quiescent or the deadline has passed."""
        call = self._deferred
        if call is None or (busy and now < (self.deadline or 0.0)):
            return []
        self._deferred = self.deadline = None
        return [(call, False, busy)] if busy else self._do(call)

    def launch(self, in_flight: int, depth: int, transfers: int) -> tuple[ForwardMode, str | int | None] | None:
        """**Weight update**, **Sleep**, **Profile**: the order to the stages, in a microbatch of its own."""
        if self.update is not None:
            return None if in_flight else (ForwardMode.UPDATE, self.update.model_path)
        if self.sleep_calls:
            level = first.level if isinstance(first := self.sleep_calls[0], Sleep) else 0
            return None if in_flight or transfers else (ForwardMode.SLEEP, level)
        if self._profile is None or self._is_launched or in_flight >= depth:
            return None
        self._is_launched = True
        return ForwardMode.PROFILE, self._profile.folder if isinstance(self._profile, StartProfile) else None

    def finish(self, mode: ForwardMode, error: str | None) -> list[Answer]:
        """Answer the call whose order the stages have carried out, or failed to."""
        if mode is ForwardMode.PROFILE:
            call, self._profile, self._is_launched = self._profile, None, False
            self.is_profiling = isinstance(call, StartProfile) and error is None
            return [(call, error is None, error or "")]
        if mode is ForwardMode.SLEEP:
            return self._finish_sleep(error)
        update, self.update = self.update, None
        self._totals["weights_version"] += error is None
        if error is None:
            assert update is not None, "the result of an update belongs to a call"
            self.weights.append(update.model_path)
            self.sleep_level = min(self.sleep_level, 1)
            return [(update, True, self._flush())]
        return [(update, False, error, ("fault", "model_path" if update and update.model_path else None))]

    def fail_all(self, failure: str) -> list[Answer]:
        """**Death**: every pending call fails, because nothing is launched any more."""
        answers = [] if self.update is None else [(self.finish(ForwardMode.UPDATE, failure)[0][0], False, failure)]
        answers += [] if self._profile is None else self.finish(ForwardMode.PROFILE, failure)
        sleep_calls, self.sleep_calls = self.sleep_calls, []
        return [*answers, *[(call, False, failure) for call in sleep_calls]]

    def _ask_profile(self, call: StartProfile | StopProfile) -> list[Answer]:
        """**Profile**: one at a time; a call in order waits for a place in the pipeline, any other is refused."""
        if self._profile is not None or isinstance(call, StartProfile) is self.is_profiling:
            return [(call, False, "")]
        self._profile = call
        return []

    @property
    def is_awake(self) -> bool:
        """**Sleep**: nothing is launched for requests from the step that accepts a sleep to the end of the wake."""
        return not (self.sleep_calls or self.sleep_level)

    def _ask_sleep(self, call: Sleep | Wake) -> list[Answer]:
        """**Sleep**: queue sleeps and wakes in order; refuse a wake without weights."""
        if isinstance(call, Wake):
            if self.is_awake:
                return [(call, True, "awake")]
            if self.sleep_level > 1 or any(isinstance(call, Sleep) and call.level > 1 for call in self.sleep_calls):
                return [(call, False, "/update_weights_from_disk")]
        self.sleep_calls.append(call)
        return []

    def _finish_sleep(self, error: str | None) -> list[Answer]:
        """**Sleep**: the stages are asleep or awake, and nothing is cached; a failure changes nothing."""
        call = self.sleep_calls.pop(0)
        if error is not None:
            return [(call, False, error)]
        dropped = self._flush().removeprefix("flushed")
        self.sleep_level = max(self.sleep_level, call.level) if isinstance(call, Sleep) else 0
        says = f"asleep (level={self.sleep_level}), dropped{dropped}" if self.sleep_level else "awake"
        return [(call, True, says)]

    def _do(self, call: FlushCache | UpdateWeights) -> list[Answer]:
        if isinstance(call, FlushCache):
            self._grammars.shrink(0)
            return [(call, True, self._flush())]
        self.update = call
        return []

    def _flush(self) -> str:
        return f"flushed {self._memory.flush()} cached pages"
