"""The harness's own wire: what the test process and the scripted gate say to each other over a private socket.

Typed msgpack structs, never pickle. A script travels as the file and the name of its function, and plain arguments.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.limits import Limits
from engine.scheduler import StepRecord
from scripted.report import FailureReport
from scripted.trace import Note

__all__ = [
    "HookReady",
    "Progress",
    "RunScript",
    "ScriptFailedReply",
    "ScriptOptions",
    "ScriptSucceeded",
    "Shutdown",
    "decode_command",
    "decode_reply",
]

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_MAX_STEPS = 10_000
# A forward pass of a test model takes milliseconds, and so does every answer of the front end.
DEFAULT_RESULT_TIMEOUT_S = 10.0


class ScriptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a script is run.

    ``max_steps`` bounds its steps, ``timeout_s`` its seconds; ``oracle`` compares the output of finished greedy
    requests with the same request run alone; ``check_every_step`` audits the engine's books after each step; each of
    ``must_reach`` has to be seen by ``t.sometimes``. ``record`` brings every step back with the result, for a trace. A
    process that has to answer at once and says nothing for ``result_timeout_s`` hangs.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    max_steps: int = DEFAULT_MAX_STEPS
    oracle: bool = True
    check_every_step: bool = True
    must_reach: tuple[str, ...] = ()
    record: bool = False
    replay: str = ""
    result_timeout_s: float = DEFAULT_RESULT_TIMEOUT_S


class RunScript(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the function ``name`` of the Python file ``file`` with ``t`` and these arguments.

    ``import_paths`` are the caller's import paths, so that the file imports in the engine what it imports in the test.
    """

    file: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    options: ScriptOptions = ScriptOptions()
    import_paths: tuple[str, ...] = ()


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the server."""


class HookReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is warmed up, drained and frozen; scripts may come."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step of the running script, told as it happens: what is known of a script whose process leaves no last word."""

    record: StepRecord
    limits: Limits


class ScriptSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script passed. ``steps`` and the digests cover its own steps; ``reached`` counts its windows by name.

    ``spent``: the script killed a stage, so the engine is of no further use. ``records``, ``notes`` (each window at its
    first step) and ``limits`` are there when the options asked for a record.
    """

    steps: int
    digest: str
    plan_digest: str
    reached: dict[str, int]
    compared: int = 0
    spent: bool = False
    records: tuple[StepRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    limits: Limits | None = None


class ScriptFailedReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script did not pass."""

    report: FailureReport


_command_decoder: msgspec.msgpack.Decoder[RunScript | Shutdown] = msgspec.msgpack.Decoder(RunScript | Shutdown)
_reply_decoder: msgspec.msgpack.Decoder[HookReady | Progress | ScriptSucceeded | ScriptFailedReply] = (
    msgspec.msgpack.Decoder(HookReady | Progress | ScriptSucceeded | ScriptFailedReply)
)


def decode_command(data: bytes) -> RunScript | Shutdown:
    """Decode a command to the gate. Raises msgspec.DecodeError (a ValueError) for anything else."""
    return _command_decoder.decode(data)


def decode_reply(data: bytes) -> HookReady | Progress | ScriptSucceeded | ScriptFailedReply:
    """Decode a reply of the gate. Raises msgspec.DecodeError (a ValueError) for anything else."""
    return _reply_decoder.decode(data)
