"""The administrative calls: flush, abort of everything, pause, sleep, profile. Each has one route and one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engine.core.messages import (
    AbortAll,
    ClientMessage,
    ContinueGeneration,
    FlushCache,
    PauseGeneration,
    PauseMode,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.script.clients import Call
from scripted.sdk.action_bases import PauseCall, ResumeCall
from scripted_lockstep.actions.action import EngineCall

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

PAUSE_MODES: Final = tuple(mode.value for mode in PauseMode)
SLEEP_MODES: Final = tuple(mode.value for mode in PauseMode if mode is not PauseMode.IN_PLACE)
_LEVELS: Final = (1, 2)
# How long calls that a search adds may be deferred, in seconds.
DEFERRED_S: Final = 1.0
# Simulated stages write nothing; the front end chooses its own folder.
_TRACES: Final = "traces"


def check_timeout(call: str, timeout_s: Any) -> None:
    """Raise BadCall unless this is a number of virtual seconds or None."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and (not number or not math.isfinite(timeout_s)):
        raise BadCall(f"{call} takes timeout_s in virtual seconds, or None, got {timeout_s!r}")


class Flush(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="flush"):
    """Flushes the cache; with ``timeout_s`` the flush may be deferred."""

    timeout_s: float | None = None

    examples: ClassVar = ("flush", "flush timeout_s=2.5")
    event: ClassVar = FlushCache
    phrase: ClassVar = "flush"
    route: ClassVar = "/flush_cache"
    shell_words: ClassVar = {"flush": "flush_cache"}

    @staticmethod
    @verb
    def flush_cache(t: BaseContext, timeout_s: float | None = None) -> Call:
        """POST ``/flush_cache``; ``timeout_s``, in virtual seconds, is how long it may wait for a quiescent engine."""
        check_timeout("flush_cache()", timeout_s)
        return Flush(timeout_s=timeout_s).post(t)

    @property
    def kind(self) -> str:
        return "flush" if self.timeout_s is None else "flush-later"

    @property
    def path(self) -> str:
        return self.route if self.timeout_s is None else f"{self.route}?timeout={self.timeout_s}"

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return cls(), cls(timeout_s=DEFERRED_S)

    @classmethod
    def words(cls, event: FlushCache) -> str:
        # In capitals, because most races involve a flush.
        return "FLUSH" if event.timeout_s is None else f"FLUSH, waits up to {event.timeout_s:g} s"


class AbortEverything(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="abort-all"):
    """Aborts all live requests. In the shell it is ``abort all``."""

    examples: ClassVar = ("abort-all",)
    needs_open: ClassVar[bool] = True
    event: ClassVar = AbortAll
    is_extra: ClassVar[bool] = True
    phrase: ClassVar = "abort all"
    route: ClassVar = "/abort_request"

    @staticmethod
    @verb
    def abort_all(t: BaseContext) -> Call:
        """POST ``/abort_request`` for all live requests."""
        return AbortEverything().post(t)

    @property
    def body(self) -> Mapping[str, Any]:
        return {"abort_all": True}


class PauseServing(EngineCall, PauseCall, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    mode: PauseMode = PauseMode.RETRACT

    examples: ClassVar = ("pause", "pause mode=in_place", "pause mode=abort")
    event: ClassVar = PauseGeneration

    @staticmethod
    @verb
    def pause_generation(t: BaseContext, mode: str = "retract") -> Call:
        """POST ``/pause_generation`` with mode ``retract``, ``in_place`` or ``abort``."""
        if mode not in PAUSE_MODES:
            raise BadCall(f"pause_generation() takes one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        return PauseServing(mode=PauseMode(mode)).post(t)

    @property
    def kind(self) -> str:
        return f"pause-{self.mode.value}"

    @property
    def body(self) -> Mapping[str, Any]:
        return {"mode": self.mode.value}

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(mode=mode) for mode in PauseMode]


class ResumeServing(ResumeCall, EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="continue"):
    event: ClassVar = ContinueGeneration
    # Added only in a few workloads.
    search_turn: ClassVar[int] = 1

    @staticmethod
    @verb
    def continue_generation(t: BaseContext) -> Call:
        """POST ``/continue_generation``."""
        return ResumeServing().post(t)


class SleepServing(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="sleep"):
    """Releases the memory of the stages."""

    level: int = 1
    mode: PauseMode = PauseMode.RETRACT

    examples: ClassVar = ("sleep", "sleep level=2 mode=abort")
    event: ClassVar = Sleep
    route: ClassVar = "/sleep"
    shell_words: ClassVar = {"sleep": "sleep"}

    @staticmethod
    @verb
    def sleep(t: BaseContext, level: int = 1, mode: str = "retract") -> Call:
        """POST ``/sleep``: requests return to the queue or end (``abort``); weights and KV memory are freed.

        After level 2 the engine wakes only once the weights were updated.
        """
        if level not in _LEVELS or isinstance(level, bool):
            raise BadCall(f"sleep() takes level 1 or 2, got {level!r}")
        if mode not in SLEEP_MODES:
            raise BadCall(f"sleep() takes one of {', '.join(SLEEP_MODES)} as mode, got {mode!r}")
        return SleepServing(level=level, mode=PauseMode(mode)).post(t)

    @property
    def kind(self) -> str:
        return f"sleep-{self.level}-{self.mode.value}"

    @property
    def body(self) -> Mapping[str, Any]:
        return {"level": self.level, "mode": self.mode.value}

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return cls(), cls(level=2, mode=PauseMode.ABORT)

    @classmethod
    def words(cls, event: Sleep) -> str:
        return f"sleep (level={event.level}, {event.mode})"


class WakeServing(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="wake"):
    """Restores the memory of the stages."""

    examples: ClassVar = ("wake",)
    added_beside: ClassVar = "sleep"
    event: ClassVar = Wake
    phrase: ClassVar = "wake"
    route: ClassVar = "/wake"
    shell_words: ClassVar = {"wake": "wake"}
    search_turn: ClassVar[int] = 1

    @staticmethod
    @verb
    def wake(t: BaseContext) -> Call:
        """POST ``/wake``: the stages allocate weights and KV memory again, and waiting requests continue."""
        return WakeServing().post(t)

    def reaches(self, run: RunLike) -> bool:
        return super().reaches(run) and not run.machine.scheduler.books.is_awake


class BeginProfile(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="profile"):
    """Starts a profile of the stages, which takes a pipeline slot."""

    examples: ClassVar = ("profile",)
    added_beside: ClassVar = "profile"
    event: ClassVar = StartProfile
    phrase: ClassVar = "begin a profile"
    route: ClassVar = "/start_profile"
    shell_words: ClassVar = {"profile": "start_profile"}
    search_turn: ClassVar[int] = 1

    @staticmethod
    @verb
    def start_profile(t: BaseContext) -> Call:
        """POST ``/start_profile``: the stages begin to profile themselves, by a microbatch without tokens."""
        return BeginProfile().post(t)

    def message(self, call_id: str) -> StartProfile:
        return StartProfile(call_id=call_id, folder=_TRACES)

    def is_sent_as(self, message: ClientMessage) -> bool:
        return isinstance(message, StartProfile)


class EndProfile(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="profile-end"):
    examples: ClassVar = ("profile-end",)
    added_beside: ClassVar = "profile"
    event: ClassVar = StopProfile
    phrase: ClassVar = "end the profile"
    route: ClassVar = "/stop_profile"
    shell_words: ClassVar = {"profile_end": "stop_profile"}
    search_turn: ClassVar[int] = 1

    @staticmethod
    @verb
    def stop_profile(t: BaseContext) -> Call:
        """POST ``/stop_profile``."""
        return EndProfile().post(t)
