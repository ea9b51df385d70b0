"""The scheduler process without its server: real inbox, control pipe and gate, and whatever pipeline is given.

What the benchmark of the gate stands on. Everything is in this process; nothing listens on a port.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from engine.clock import MonotonicClock
from engine.limits import EMBEDDED_FACTS, Limits
from engine.messages import ClientMessage, Reply, encode
from engine.process.control import Control
from engine.scheduler import Scheduler
from engine.scheduler.ports import Pipeline
from engine.scheduler_process.gate_context import GateContext
from engine.scheduler_process.inbox import Inbox
from engine.scheduler_process.live_gate import LiveGate
from engine.settings import ServerSettings

__all__ = ["BareServer"]

REQUESTS = "inproc://requests"


class DiscardingOutbox:
    """An outbox that forgets."""

    def send(self, replies: Sequence[Reply]) -> None:
        pass


class BareServer:
    """One scheduler with what its gate needs; a context manager."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.limits = Limits.of(settings, EMBEDDED_FACTS)
        self.scheduler = Scheduler(self.limits)
        self._stack = ExitStack()
        self.zmq = self._stack.enter_context(zmq.Context())
        self.inbox = Inbox(self.zmq, REQUESTS)
        self._stack.callback(self.inbox.close)
        self._client = self._stack.enter_context(self.zmq.socket(zmq.PUSH))
        self._client.connect(REQUESTS)
        supervisor, theirs = Pipe()
        self._stack.callback(supervisor.close)
        self._stack.callback(theirs.close)
        self.control = Control(theirs)

    def gate(self, pipeline: Pipeline) -> LiveGate:
        """A live gate over this server's sockets and that pipeline."""
        return LiveGate(
            GateContext(
                settings=self.settings,
                limits=self.limits,
                scheduler=self.scheduler,
                pipeline=pipeline,
                inbox=self.inbox,
                outbox=DiscardingOutbox(),
                control=self.control,
                clock=MonotonicClock(),
                base_url="",
                private_dir=Path(),
                stage_pids=(),
            )
        )

    def send(self, message: ClientMessage) -> None:
        """Be the front end; from one thread only."""
        self._client.send(encode(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
