"""The base of an engine's hooks: wraps the calls of its scheduler and reports each to a recorder.

An error in a hook ends the recording, never the engine.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from scripted.sdk.flight.frames import FlightHeader
from scripted.sdk.flight.packed import Beginning
from scripted.sdk.flight.recorder import FlightRecorder, recorder_of

P = ParamSpec("P")
R = TypeVar("R")


class Hooks(ABC):
    """The wrapped calls of one scheduler. Requests and plans are counted from 1."""

    recorder: FlightRecorder

    def __init__(self) -> None:
        self._requests = 0
        self._plans = 0

    def attach(self, header: FlightHeader) -> FlightRecorder | None:
        """Record the scheduler as the environment asks; None if it asks for nothing or its options are wrong."""
        recorder = recorder_of(os.environ, header, self.snapshot)
        if recorder is not None:
            self.recorder = recorder
            self.wrap_calls()
        return recorder

    @abstractmethod
    def wrap_calls(self) -> None:
        """Replace the scheduler's calls with wrapped ones."""

    @abstractmethod
    def snapshot(self) -> Beginning:
        """Describe the scheduler's current state, for a ring that has lost earlier frames."""

    def wrapped(
        self,
        own: Callable[P, R],
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> Callable[P, R]:
        """Wrap a call: ``before`` gets its arguments, ``after`` its result and its arguments."""

        @functools.wraps(own)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self.note(before, *args, **kwargs)
            try:
                returned = own(*args, **kwargs)
            except Exception as exc:
                self.leave_crash(exc)
                raise
            self.note(after, returned, *args, **kwargs)
            return returned

        return call

    def note(self, note: Callable[..., None] | None, *args: object, **kwargs: object) -> None:
        """Report a call to the recorder; an error here ends the recording, not the engine."""
        if note is None or not self.recorder.is_on:
            return
        try:
            note(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - the engine survives any error here
            self.recorder.fail(exc)

    def leave_crash(self, exc: Exception) -> None:
        """Write the recording of a call that raised."""
        self.recorder.leave("crash", f"{type(exc).__name__}: {exc}")
