"""The supervisor's view of a process of the engine on any machine: its messages, its state, its death.

The common base of processes forked here and processes on other machines, and the rule for which of several deaths
caused the others. Contacts no process.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.process.control import ChildMessage, Drained, Dying, Loading, Ready, SupervisorMessage
from engine.process.death import EXIT_FAILED, DeathReport, describe_status


class WatchedProcess(ABC):
    """One process. ``fileno()`` is readable when it has sent a message or ended; ``pid`` is its number on its own
    machine.

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
        """True until its end is noticed."""
        return self.status is None

    @property
    def who(self) -> str:
        """Its name, with its machine unless that is this one."""
        return self.name

    @abstractmethod
    def fileno(self) -> int:
        """The file descriptor to wait on."""

    @abstractmethod
    def send(self, message: SupervisorMessage) -> None:
        """Send it a message. ``listen`` reports whether it is gone."""

    @abstractmethod
    def listen(self) -> ChildMessage | None:
        """Read a message, or note the process's end. Call it when ``fileno()`` is readable. None without a message."""

    @abstractmethod
    def look_for_stop(self) -> None:
        """Note whether a signal has stopped it. Call it after SIGCHLD."""

    @abstractmethod
    def end(self, why: str) -> None:
        """Kill it, and note the reason as its cause of death."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; harmless once it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the supervisor's end of the connection."""

    @property
    def node(self) -> str:
        """The name of its machine, empty if that is this one."""
        return ""

    @property
    def place(self) -> str:
        """Its machine with address and processes, for messages; empty if it is this one."""
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


def is_cause(child: WatchedProcess) -> bool:
    """Return whether a process died by itself: it neither shut down cleanly nor blames another one."""
    return child.status != 0 and not _is_victim(child)


def _is_victim(child: WatchedProcess) -> bool:
    return child.dying is not None and child.dying.victim_of is not None


def first_death(ended: Sequence[WatchedProcess], alive: Sequence[WatchedProcess]) -> DeathReport:
    """Return the first of these deaths that no other one caused, or else that of the process that the victims blame.

    A victim may still be alive: a process that shuts down cleanly reports its reason first.
    """
    child = next(filter(is_cause, ended), None)
    blame = {one.dying.victim_of: one.dying.victim_cause for one in (*ended, *alive) if one.dying is not None}
    blamed = next(filter(None, blame), None)
    if child is None and blamed is not None:
        # It is not dead yet, but the others can wait no longer.
        stuck = next((one for one in alive if one.name in blame and not _is_victim(one)), None)
        if stuck is not None:
            return _report_of(stuck, blame[stuck.name] if stuck.dying is None else _cause_of(stuck, EXIT_FAILED))
        if blamed not in {one.name for one in ended}:  # It is a helper of a victim, as the reader is of the front end.
            return DeathReport(process=blamed, pid=0, cause=blame[blamed], when=time.time())
    child = child or ended[0]
    status = child.status if child.status is not None else EXIT_FAILED
    return _report_of(child, _cause_of(child, status), status)


def _report_of(child: WatchedProcess, cause: str, status: int | None = None) -> DeathReport:
    return DeathReport(
        process=child.name,
        pid=child.pid,
        cause=cause,
        when=time.time(),
        exit_code=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        node=child.node,
        place=child.place,
    )


def _cause_of(child: WatchedProcess, status: int) -> str:
    if child.dying is None:
        return describe_status(status)
    return child.dying.error if child.dying.expected else child.dying.traceback
