"""Starts a live server of an adapter's engine: its own command on loopback, with our hook as a plugin.

An engine that loads plugins from the metadata of installed packages finds ours on its processes' path, in the server's
private folder; nothing in the engine is edited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from typing_extensions import TypeVar

from scripted.core.refusals import ScriptDefinitionError
from scripted.script.execution import ScriptOutcome
from scripted.script.wire import HookReady, ScriptFailedReply

MODEL: Final = "model"
SOCKET: Final = "gate"
# The hook's environment: the folder of the socket, and the process whose end it follows.
FOLDER_VARIABLE: Final = "SCRIPTED_LIVE_FOLDER"
OWNER_VARIABLE: Final = "SCRIPTED_LIVE_OWNER"
# The address of the front end, and the adapter's settings.
PORT_VARIABLE: Final = "SCRIPTED_LIVE_PORT"
SETTINGS_VARIABLE: Final = "SCRIPTED_LIVE_SETTINGS"


class ServerCommand(NamedTuple):
    """A command with additions to its environment."""

    command: Sequence[str]
    environment: Mapping[str, str]


# Makes the command for a configuration, an empty folder and a free port. Raises ScriptDefinitionError for settings that
# the live engine lacks.
_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct, default=Any)
Launcher = Callable[[_SettingsT, Path, int], ServerCommand]


class Plugin(NamedTuple):
    """The entry-point ``group`` of an engine's plugins, and the function ``hook`` (MODULE:NAME) that it calls."""

    group: str
    hook: str


def server_command(
    settings: msgspec.Struct,
    folder: Path,
    port: int,
    plugin: Plugin,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> ServerCommand:
    """Return a Python ``command``, with tiny models in the folder ``MODEL`` and the hook on its path."""
    _write_plugin(folder, plugin)
    common = {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        PORT_VARIABLE: str(port),
        SETTINGS_VARIABLE: msgspec.json.encode(settings).decode(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return ServerCommand([sys.executable, "-m", *command], common | dict(environment))


def check_simulated(settings: msgspec.Struct, simulated: Sequence[str], runs: str) -> None:
    """Raise ScriptDefinitionError for settings that only the simulated device understands."""
    given, default = (msgspec.structs.asdict(one) for one in (settings, type(settings)()))
    strange = [name for name in simulated if given[name] != default[name]]
    if strange:
        raise ScriptDefinitionError(f"{runs}, and this script sets {', '.join(strange)}; run it with --tier sim")


def option_words(values: Mapping[str, object]) -> list[str]:
    """Return a command's words for options given by their Python names."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _write_plugin(folder: Path, plugin: Plugin) -> None:
    metadata = folder / "scripted_live-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-live\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{plugin.group}]\nscripted_live = {plugin.hook}\n")


# -- the gate's answer to a script --


class Passed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    outcome: ScriptOutcome


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script neither passed nor failed: the harness or the adapter has a defect."""

    text: str


Reply = HookReady | Passed | ScriptFailedReply | Broken
