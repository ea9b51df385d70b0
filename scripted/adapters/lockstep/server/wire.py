"""The harness's own wire: the messages between the test process and the scripted gate, over a private socket.

Typed msgpack structs, never pickle. A script travels as the file and the name of its function, and plain arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.frames import decoder_of
from engine.limits import Limits
from engine.scheduler import StepRecord
from scripted.adapters.lockstep.script.execution import ScriptSucceeded
from scripted.report.failure import FailureReport
from scripted.report.frames import Frame
from scripted.script.options import ScriptOptions


class RunScript(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the function ``name`` of the Python file ``file`` with ``t`` and these arguments, which are packed.

    ``import_paths`` are the caller's import paths, so that the file imports in the engine what it imports in the test.
    """

    file: str
    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    options: ScriptOptions = ScriptOptions()
    import_paths: tuple[str, ...] = ()


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the server."""


class HookReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server is warmed up, drained and frozen; scripts may come."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step of the running script, sent as it happens: all that is known if its process dies without a message.

    ``printed`` is what the script printed since the last one, ``position`` the lines at which it stands.
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
    """The script needs these. They are kept for those after it."""

    engines: tuple[EngineWanted, ...]


class EnginesKilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill these with all their processes."""

    names: tuple[str, ...]


class EnginePlace(msgspec.Struct, frozen=True):
    """An engine of a fleet that serves: its URL, its folder, its supervisor."""

    name: str
    base_url: str
    private_dir: str
    pid: int


class EnginesServed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to either, once it is done; ``error`` says why engines could not be started."""

    places: tuple[EnginePlace, ...] = ()
    error: str = ""


class ScriptFailedReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    report: FailureReport


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
