"""What the callers of profiles were told: one profile at a time, begun and ended by microbatches of their own.

Fed with calls, launches, results and answers by the account of clients. It knows no request.
"""

from __future__ import annotations

from engine.messages import CallAnswer, StartProfile, StopProfile
from engine.plan import ProfileSwitch
from scripted.core.violation import Violation

__all__ = ["ProfileCalls"]


class ProfileCalls:
    """``folder`` is where the profile that is being taken goes; None when none is taken."""

    def __init__(self) -> None:
        self.folder: str | None = None
        # The call that is not launched, and the one that is and has no answer; whether each answer due is a success.
        self._due: StartProfile | StopProfile | None = None
        self._launched: StartProfile | StopProfile | None = None
        self._answers: dict[str, bool] = {}

    def ask(self, call: StartProfile | StopProfile) -> None:
        """Note a call: it is refused, or it waits for a place in the pipeline."""
        is_busy = self._due is not None or self._launched is not None
        if is_busy or isinstance(call, StartProfile) is (self.folder is not None):
            self._answers[call.call_id] = False
        else:
            self._due = call

    def launch(self, switch: ProfileSwitch) -> None:
        """The stages are told. Raises Violation for what was not asked for."""
        folder = self._due.folder if isinstance(self._due, StartProfile) else None
        if self._due is None or folder != switch.folder:
            raise Violation(f"a profile goes to {switch.folder}, but asked for is {self._due}")
        self._launched, self._due = self._due, None

    def land(self, error: str | None) -> None:
        """The stages have done what the last call says, or could not."""
        call, self._launched = self._launched, None
        assert call is not None, "the result of a profile belongs to a microbatch that was launched"
        self._answers[call.call_id] = error is None
        self.folder = call.folder if isinstance(call, StartProfile) and error is None else None

    def give_up(self) -> None:
        """The pipeline is dead: what waits is refused."""
        for call in (self._due, self._launched):
            if call is not None:
                self._answers[call.call_id] = False
        self._due = self._launched = self.folder = None

    def answered(self, answer: CallAnswer) -> None:
        """Raise Violation for an answer that is not due, or not that one."""
        due = self._answers.pop(answer.call_id, None)
        if due is not answer.ok:
            raise Violation(f"a profile's call is answered {answer.ok}, but due is {due}: {answer.message}")

    def end_step(self, *, has_slot: bool) -> None:
        """Every answer that is due was given, and a call does not wait beside a free place. Raises Violation."""
        if self._answers:
            raise Violation(f"{', '.join(self._answers)}: a profile's call is not answered in its step")
        if self._due is not None and has_slot:
            raise Violation(f"{self._due} waits, but there is a free place in the pipeline")
