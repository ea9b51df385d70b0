"""The private socket of a scripted server, and the messages on it beside scripts and their results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

import msgspec
import zmq

from engine.core.frames import decoder_of
from engine.core.limits import Limits
from engine.core.messages import ClientMessage, Refusal
from engine.core.scheduler import Step, StepRecord
from engine.process.private_dir import RECONNECT_INTERVAL_MS
from engine.server.scheduler_process.gate_context import GateContext
from scripted.report.frames import Frame
from scripted.script.wire import HookReady, RunScript, ScriptFailedReply, Shutdown
from scripted_lockstep.mutants import mutant_named
from scripted_lockstep.script.execution import ScriptSucceeded

_SERVING_TIMEOUT_S: Final = 120.0


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The harness's options for a gate, in the server's settings; ``relay`` is where the relay takes orders."""

    mutant: str | None = None
    relay: str | None = None


def private_address(private_dir: Path) -> str:
    """The address at which a server's gate listens to the harness."""
    return f"ipc://{private_dir}/harness"


def connected_socket(context: zmq.Context[zmq.Socket[bytes]], private_dir: Path) -> zmq.Socket[bytes]:
    """Connect to the private socket of a server, which may still be starting."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.set_hwm(0)
    socket.connect(private_address(private_dir))
    return socket


class GateSocket:
    """The gate's end. A process that ends waits up to ``linger_ms`` for its last message to be sent."""

    def __init__(self, context: GateContext, *, linger_ms: int = 0) -> None:
        self.options = msgspec.json.decode(context.settings.gate_options or "{}", type=GateOptions)
        self._context = context
        self._stack = ExitStack()
        zmq_context = self._stack.enter_context(zmq.Context())
        self.socket = self._stack.enter_context(zmq_context.socket(zmq.PAIR))
        self.socket.setsockopt(zmq.LINGER, linger_ms)
        self.socket.set_hwm(0)

    def open(self) -> None:
        """Wait for the server to be open, switch the mutant on, and listen."""
        self._context.control.wait_until_serving(_SERVING_TIMEOUT_S)
        if self.options.mutant is not None:
            self._stack.enter_context(mutant_named(self.options.mutant).switched_on())
        self.socket.bind(private_address(self._context.private_dir))

    def close(self) -> None:
        self._stack.close()


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step of the running script, sent as it happens: the only trace of a process that dies without a message.

    ``printed`` is the script's output since the last message, ``position`` its current lines.
    """

    record: StepRecord | None
    limits: Limits
    printed: str = ""
    position: tuple[Frame, ...] = ()


class EngineWanted(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of a fleet, by its name in the script."""

    name: str
    role: str
    prefill_engines: str = ""


class EnginesWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script needs these engines. They are kept for later scripts."""

    engines: tuple[EngineWanted, ...]


class EnginesKilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill these engines with all their processes."""

    names: tuple[str, ...]


class EnginePlace(msgspec.Struct, frozen=True):
    """A running engine of a fleet: its URL, its folder, its supervisor."""

    name: str
    base_url: str
    private_dir: str
    pid: int


class EnginesServed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to both commands; ``error`` says why engines could not be started."""

    places: tuple[EnginePlace, ...] = ()
    error: str = ""


_Command = RunScript | Shutdown | EnginesServed
_Reply = HookReady | Progress | ScriptSucceeded | ScriptFailedReply | EnginesWanted | EnginesKilled

_command_of: Callable[[bytes], _Command] = decoder_of(_Command)
_reply_of: Callable[[bytes], _Reply] = decoder_of(_Reply)


def decode_command(data: bytes) -> _Command:
    """Decode a command to the gate. Raises BadFrameError for anything else."""
    return _command_of(data)


def decode_replies(data: bytes) -> _Reply:
    """Decode a reply of the gate. Raises BadFrameError for anything else."""
    return _reply_of(data)


# -- an engine of a fleet, and the script's process --

# The questions to an engine of a fleet between two of its steps.
FollowerVerb = Literal[
    "take_completion",
    "take_grammar",
    "take_lora",
    "take_transfer",
    "answer",
    "fail_next_step",
    "spare_next_step",
    "describe",
    "kill_stage",
    "stall_stage",
    "resume_stage",
    "limit_waits",
    "start_over",
]


class Do(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this step, and answer with its result."""

    step: Step


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Carry out a command or answer a question, without a step."""

    verb: FollowerVerb
    numbers: tuple[int | float, ...] = ()
    replies: tuple[Refusal, ...] = ()


class FollowerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is up and frozen."""

    limits: Limits


class MessagesArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The front end has sent these messages, which the scheduler has not seen. Sent unasked."""

    messages: tuple[ClientMessage, ...]


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order was carried out, or the answer to the question."""

    value: msgspec.Raw


class Unanswered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No answer to the question."""

    error: str


FollowerReply = FollowerReady | MessagesArrived | Answered | Unanswered

# Both raise BadFrameError for anything else.
decode_asked: Callable[[bytes], Do | Ask] = decoder_of(Do | Ask)
decode_reply: Callable[[bytes], FollowerReply] = decoder_of(FollowerReply)
