"""What a live gate is told by its environment, and what it says of a script."""

from __future__ import annotations

from typing import Final

import msgspec

from scripted.script.execution import ScriptOutcome
from scripted.script.wire import HookReady, ScriptFailedReply

SOCKET: Final = "gate"
# What the hook in the engine's process is told: the folder of the socket, and the process that it lives for.
FOLDER_VARIABLE: Final = "SCRIPTED_LIVE_FOLDER"
OWNER_VARIABLE: Final = "SCRIPTED_LIVE_OWNER"
# And where its front end listens, and its adapter's settings.
PORT_VARIABLE: Final = "SCRIPTED_LIVE_PORT"
SETTINGS_VARIABLE: Final = "SCRIPTED_LIVE_SETTINGS"


class Passed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    outcome: ScriptOutcome


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script neither passed nor failed: the harness or the adapter has a defect."""

    text: str


Reply = HookReady | Passed | ScriptFailedReply | Broken
