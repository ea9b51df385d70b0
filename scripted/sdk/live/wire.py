"""The messages between the test process and the gate in the engine's process, over a private socket."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from scripted.report.failure import FailureReport
from scripted.script.execution import ScriptOutcome
from scripted.script.options import ScriptOptions

SOCKET: Final = "gate"
# What the hook in the engine's process is told: the folder of the socket, and the process that it lives for.
FOLDER_VARIABLE: Final = "SCRIPTED_LIVE_FOLDER"
OWNER_VARIABLE: Final = "SCRIPTED_LIVE_OWNER"
# And where its front end listens, and its adapter's settings.
PORT_VARIABLE: Final = "SCRIPTED_LIVE_PORT"
SETTINGS_VARIABLE: Final = "SCRIPTED_LIVE_SETTINGS"


class RunLiveScript(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the function ``name`` of ``file``. Its arguments are packed; ``import_paths`` are those of the test."""

    file: str
    name: str
    arguments: dict[str, Any]
    options: ScriptOptions
    mutant: str | None
    import_paths: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's loop waits at the gate."""


class Passed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    outcome: ScriptOutcome


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script did not pass, or with ``text`` alone the harness or the adapter has a defect."""

    report: FailureReport | None
    text: str = ""


Reply = Ready | Passed | Failed
