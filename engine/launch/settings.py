"""What a server needs beyond the engine's configuration: where it listens, which gate it runs, how long it waits.

One definition of every field, read by ``engine serve`` from flags, then from the environment (``ENGINE_<FIELD>``), then
from the defaults. Changes nothing that the engine computes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, SerializationInfo, field_serializer, field_validator

from engine.config import EngineConfig
from engine.errors import ConfigError

__all__ = ["ENVIRONMENT_PREFIX", "LIVE_GATE", "REVEAL_KEYS", "ServerSettings", "read_settings"]

ENVIRONMENT_PREFIX = "ENGINE_"
LIVE_GATE = "engine.launch.live_gate:LiveGate"
DEFAULT_MAX_BODY_BYTES = 16 * 1024 * 1024
NEARLY_OURS = 0.9
_VISIBLE = re.compile(r"[!-~]+")
# The context of a dump that has the keys in it, for a process that is to serve with them.
REVEAL_KEYS = {"reveal_keys": True}


class ServerSettings(EngineConfig):
    """An engine's configuration and its server's. Raises ConfigError for a bad value, as EngineConfig does."""

    # The cause of an error must not show a key either.
    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(30_000, ge=0, le=65_535, description="TCP port to listen on; 0 takes any free one")
    served_model_name: str = Field("", description="name under which clients ask for the model; unset: as in model")
    gate: str = Field(
        LIVE_GATE, pattern=r"^[\w.]+:\w+$", description="the step gate, as 'package.module:factory'; for harnesses"
    )
    gate_options: str = Field("", description="text that is handed to the gate as it is")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least severe log line shown"
    )
    max_body_bytes: int = Field(
        DEFAULT_MAX_BODY_BYTES, ge=1, description="largest request body in bytes; a larger one is refused with 413"
    )
    api_key: SecretStr | None = Field(
        None, description="key that clients send as a bearer token; better in a file or the environment than as a flag"
    )
    admin_key: SecretStr | None = Field(
        None, description="key of the operators' routes; without one they are closed unless listening on loopback"
    )
    start_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="longest wait, in seconds, for all processes to be ready"
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, le=86_400, description="longest wait, in seconds, for live requests after SIGTERM; 0: none"
    )
    shutdown_grace_s: float = Field(
        1.0, ge=0, le=1.2, description="longest wait, in seconds, for processes to end by themselves at shutdown"
    )

    @field_validator("api_key", "admin_key", mode="before")
    @classmethod
    def _key_can_be_sent(cls, key: object) -> object:
        # Everything is judged here, because the framework's own errors show the value.
        text = key.get_secret_value() if isinstance(key, SecretStr) else key
        if text is not None and not (isinstance(text, str) and _VISIBLE.fullmatch(text)):
            raise ValueError(
                "a key must be visible ASCII characters without spaces, got something else; choose another"
            )
        return key

    @field_serializer("api_key", "admin_key", when_used="json-unless-none")
    def _mask(self, key: SecretStr, info: SerializationInfo) -> str:
        return key.get_secret_value() if info.context == REVEAL_KEYS else str(key)


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> ServerSettings:
    """Settings from flags (None: not given) over environment variables over defaults.

    Raises ConfigError; a value that came from the environment is named by its variable.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    inherited: dict[str, Any] = {
        name: text for name, text in _from_environment(environment).items() if name not in given
    }
    try:
        return ServerSettings(**inherited, **given)
    except ConfigError as exc:
        lines = [_with_origin(line, inherited) for line in str(exc).splitlines()]
        raise ConfigError("\n".join(lines)) from exc


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The fields that the environment sets, stripped; an empty variable counts as unset.

    Raises ConfigError for a variable that is nearly one of ours: ignored, it would leave a default in silence. Others
    with our prefix may be somebody else's.
    """
    ours = [_variable(name) for name in ServerSettings.model_fields]
    for variable in environment.keys() - set(ours):
        near = difflib.get_close_matches(variable, ours, n=1, cutoff=NEARLY_OURS)
        if variable.startswith(ENVIRONMENT_PREFIX) and near:
            raise ConfigError(f"{variable} must be spelled {near[0]} to be read, or be renamed to be left alone")
    found = {name: environment.get(_variable(name), "").strip() for name in ServerSettings.model_fields}
    return {name: text for name, text in found.items() if text}


def _with_origin(line: str, inherited: Mapping[str, str]) -> str:
    """An error line that starts with a field, starting with the variable that set the field."""
    name = line.partition(" ")[0]
    return f"{_variable(name)}{line.removeprefix(name)}" if name in inherited else line


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"
