"""The command of a live SGLang: its own server, with our hook in its documented plugin group."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from scripted.sdk.live.launch import MODEL, Plugin, ServerCommand, check_simulated, option_words, server_command
from scripted_sglang.config import ON_CPU, SglangSettings

# SGLang calls it in each of its processes.
_PLUGIN: Final = Plugin("sglang.srt.plugins", "scripted_sglang.live.hook:install")
_SERVER: Final = "scripted_sglang.live.serve"
_SIMULATED: Final = ("client_rids",)
_RUNS: Final = "a live SGLang takes the names that clients give"


def launch(settings: SglangSettings, folder: Path, port: int) -> ServerCommand:
    """Return the command. Raises ScriptDefinitionError for settings that a live SGLang lacks."""
    check_simulated(settings, _SIMULATED, _RUNS)
    models = folder / MODEL
    values = ON_CPU | settings.of_server | {"host": "127.0.0.1", "port": port, "model_path": models / "0"}
    flags = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is True]
    values = {name: value for name, value in values.items() if value is not None and not isinstance(value, bool)}
    command = ["scripted.sdk.live.model", str(models), _SERVER, "--skip-server-warmup", *flags, *option_words(values)]
    return server_command(settings, folder, port, _PLUGIN, command, {})
