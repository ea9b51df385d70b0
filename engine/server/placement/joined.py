"""A stage on another machine, which the supervisor treats like a forked process, by its agent's reports.

Owns the facts about the machine, and decides when its silence counts as its end. Never waits for the agent.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import Final

from engine.core.frames import BadFrameError
from engine.pipeline.progress import Phase, StageProgress
from engine.process.control import STAGE_PREFIX, ChildMessage, Drained, Dying, Loading, Ready, SupervisorMessage
from engine.process.watched import WatchedProcess
from engine.server.placement.control_link import ControlLink, LinkOver
from engine.server.placement.messages import (
    AgentMessage,
    Assigned,
    Begin,
    Ended,
    Join,
    Prepared,
    Pulse,
    Refused,
    SendSignal,
    StagePulse,
    Started,
)

EXIT_LOST: Final = 1

logger = logging.getLogger(__name__)


class JoinedStage(WatchedProcess):
    """A stage whose agent has joined. ``pid`` is the stage's on its own machine, 0 before it has started.

    ``prepared`` is its machine's report, None until that has arrived.
    """

    def __init__(self, link: ControlLink[AgentMessage], join: Join, peer: str, progress: StageProgress) -> None:
        super().__init__("a stage", 0)
        self.join = join
        self.prepared: Prepared | None = None
        self.stage = -1
        self._link = link
        self._peer = peer
        self._progress = progress

    @property
    def who(self) -> str:
        return f"{self.name} on {self.place}"

    @property
    def node(self) -> str:
        """The name of its machine, which may be shown to clients."""
        return self.join.node

    @property
    def place(self) -> str:
        address = f" at {self.join.address}" if self.join.address else ""
        stage = f", pid {self.pid}" if self.pid else ""
        return f"{self.join.node}{address} ({self._peer}, agent {self.join.pid}{stage})"

    def take_number(self, stage: int) -> None:
        self.stage, self.name = stage, f"{STAGE_PREFIX}{stage}"

    def fileno(self) -> int:
        return self._link.fileno()

    def send(self, message: SupervisorMessage) -> None:
        self._link.send(message)

    def order(self, message: Refused | Assigned | Begin) -> None:
        self._link.send(message)

    def watch(self, timeout_s: float, now: float) -> None:
        """Count the silence of its agent as its end from now on."""
        self._link.watch(timeout_s, now)

    def listen(self) -> ChildMessage | None:
        """Read its agent's messages, and record the end of the stage, the agent or the connection."""
        try:
            for message in self._link.receive(time.monotonic()):
                self._hear(message)
        except LinkOver as exc:
            self._lose(f"{exc}: its agent was ended, or its machine is gone")
        except BadFrameError as exc:
            self.end(f"its agent sent an undecodable message: {exc}")
        return None

    def tend(self, now: float) -> float | None:
        """Send a pulse if one is due, and end the stage if its agent is silent. Returns when to call this again."""
        if not self.alive:
            return None
        if (why := self._link.tend(now, Pulse)) is not None:
            self.end(why)
            return None
        return self._link.due()

    def look_for_stop(self) -> None:
        """Do nothing: the agent reports a stop by itself."""

    def end(self, why: str) -> None:
        """Tell its agent to kill it, and count it as dead at once."""
        self.signal(signal.SIGKILL)
        self._lose(why)

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            self._link.send(SendSignal(int(number)))

    def close(self) -> None:
        """Close the control connection; an agent that still lives then ends its stage."""
        self._link.close()

    def _lose(self, why: str) -> None:
        self.dying = self.dying or Dying(error=why, traceback="", expected=True)
        self.status = EXIT_LOST

    def _hear(self, message: AgentMessage) -> None:
        match message:
            case Ready() | Loading() | Drained() | Dying():
                self._take(message)
            case StagePulse():
                self._note(message)
            case Prepared():
                self.prepared = message
            case Started():
                self.pid = message.pid
            case Ended():
                self.status = message.status
            case Join():
                logger.warning("dropped a second Join of %s", self.place)

    def _note(self, pulse: StagePulse) -> None:
        if not pulse.stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()
        if self.stage >= 0:
            self._progress.note(self.stage, pulse.microbatch_id, Phase(pulse.phase))
