"""What the supervisor knows of a process of the engine, wherever it runs: what it said, whether it lives.

Owns what is common to a process that was forked here and one on another machine; reaches neither.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod

from engine.process.control import ChildMessage, Drained, Dying, Loading, Ready, SupervisorMessage


class WatchedProcess(ABC):
    """One process. ``fileno()`` is readable when it spoke or ended; ``pid`` is a number of the machine it runs on.

    ``status`` is its exit status as subprocess counts it, None while it lives. ``stopped_since`` is on the monotonic
    clock.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.ready = False
        self.about: dict[str, str] = {}
        self.drained = False
        self.loading: Loading | None = None
        self.dying: Dying | None = None
        self.status: int | None = None
        self.stopped_since: float | None = None

    @property
    def alive(self) -> bool:
        """True until its end was seen."""
        return self.status is None

    @property
    def who(self) -> str:
        """Its name, with the machine that it is on if that is not this one."""
        return self.name

    @abstractmethod
    def fileno(self) -> int:
        """The file descriptor to wait on."""

    @abstractmethod
    def send(self, message: SupervisorMessage) -> None:
        """Send it a message; that a process is gone shows in ``listen``, not here."""

    @abstractmethod
    def listen(self) -> ChildMessage | None:
        """Read what it said; note its end. Called when ``fileno()`` is readable. The message, if one was read here."""

    @abstractmethod
    def look_for_stop(self) -> None:
        """Note since when it is stopped by a signal. Called after SIGCHLD."""

    @abstractmethod
    def end(self, why: str) -> None:
        """Kill it, for a reason that is its cause of death."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; harmless once it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the supervisor's end of what joins the two."""

    @property
    def node(self) -> str:
        """The name of its machine, empty if that is this one."""
        return ""

    @property
    def place(self) -> str:
        """Its machine, with its address and what runs there, for people; empty if it is this one."""
        return ""

    def _take(self, message: ChildMessage) -> None:
        if isinstance(message, Ready):
            self.ready = True
            self.about = message.about
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Drained):
            self.drained = True
        elif isinstance(message, Dying):
            self.dying = message
