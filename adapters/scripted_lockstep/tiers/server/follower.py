"""The gate of one engine of a fleet: takes its steps from the script's process and reports messages that arrive.

That process has a scheduler of its own for this engine, with the same events; the real scheduler, stages and front end
repeat its steps here. The gate decides nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from engine.core.errors import EngineError, ProcessDiedError
from engine.core.messages import encode
from engine.core.scheduler import Step, StepResult
from engine.process.control import STAGE_PREFIX, ProcessDied, Shutdown
from engine.server.scheduler_process.gate_context import GateContext
from scripted.core.errors import NoAnswer
from scripted_lockstep.machine import EngineMachine
from scripted_lockstep.tiers.server.wire import (
    Answered,
    Ask,
    Do,
    FollowerReady,
    FollowerReply,
    GateSocket,
    MessagesArrived,
    Unanswered,
    decode_asked,
)
from scripted_lockstep.tiers.server.world import ServerWorld


def follower_gate(context: GateContext) -> Follower:
    """Make the gate of a fleet's engine, whose settings name this function."""
    return Follower(context)


class Follower:
    """Repeats ordered steps, answers questions, and passes on messages as they arrive."""

    def __init__(self, context: GateContext) -> None:
        self._context = context
        self._world = ServerWorld(context)
        self._machine = EngineMachine(context.limits, digests=True, scheduler=context.scheduler)
        self._gate = GateSocket(context)
        self._socket = self._gate.socket
        self._poller = zmq.Poller()
        for source in (context.inbox.socket, context.control.fileno(), self._socket):
            self._poller.register(source, zmq.POLLIN)

    def __enter__(self) -> Self:
        self._gate.open()
        self._send(FollowerReady(limits=self._context.limits))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._world.close()
        self._gate.close()

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Wait for the next ordered step; None after a shutdown. Raises ProcessDiedError."""
        if previous is not None:
            self._send(Answered(value=msgspec.Raw(encode(previous))))
        while True:
            readable = dict(self._poller.poll())
            if self._context.control.fileno() in readable:
                message = self._context.control.receive()
                if isinstance(message, Shutdown):
                    return None
                if isinstance(message, ProcessDied) and not message.process.startswith(STAGE_PREFIX):
                    raise ProcessDiedError(message.process, message.cause, message.node)
            # Arrivals first: a question may be about one of them.
            if messages := self._context.inbox.drain():
                self._send(MessagesArrived(messages=tuple(messages)))
            if self._socket in readable:
                command = decode_asked(self._socket.recv())
                if isinstance(command, Do):
                    return command.step
                self._answer(command)

    def _answer(self, asked: Ask) -> None:
        try:
            value = self._value_of(asked)
        except (EngineError, NoAnswer, AssertionError) as exc:
            self._send(Unanswered(error=f"{type(exc).__name__}: {exc}"))
        else:
            self._send(Answered(value=msgspec.Raw(encode(value))))

    def _value_of(self, asked: Ask) -> Any:
        if asked.verb == "start_over":
            # Resets the counts of the stages and of the scheduler; a stage that describes itself has done so.
            self._world.pipeline.forget()
            self._world.pipeline.describe()
            return self._machine.start_over()
        if asked.replies:
            return self._world.answer(asked.replies)
        of = self._world.pipeline if asked.verb in ("spare_next_step", "describe") else self._world
        return getattr(of, asked.verb)(*asked.numbers)

    def _send(self, reply: FollowerReply) -> None:
        self._socket.send(encode(reply))
