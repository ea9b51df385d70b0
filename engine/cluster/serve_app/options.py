"""The options of the Serve application: an engine's settings, the number of engines, and the routing rules.

Arguments override the environment, which overrides the defaults. Knows neither Ray nor Serve.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.core.errors import ConfigError
from engine.process.settings import ServerSettings
from engine.process.settings_sources import read_settings, unread_variables

VARIABLE_PREFIX: Final = "ENGINE_SERVE_"
# Settings that make no sense for replicas: Serve listens, and several engines cannot write one file.
_NOT_OF_REPLICAS: Final = {
    "host": "Serve's proxies listen for clients; give them http_options in a Serve configuration file",
    "port": "Serve's proxies listen for clients; give them http_options in a Serve configuration file",
    "record": "every replica would write the same file; record one engine with `engine serve`",
}
_OWN: Final[dict[str, Any]] = {"host": "127.0.0.1", "port": 0, "record": ""}

logger = logging.getLogger(__name__)


class AppOptions(BaseModel):
    """Options of the application beside the engine's settings; each may be an argument or an environment variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(1, ge=1, description="engines; autoscaling_config replaces it")
    fronts: int = Field(1, ge=1, description="replicas of the front, which takes the requests and chooses an engine")
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for an engine")
    gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for an engine; with 0 it sees none")
    autoscaling_config: dict[str, Any] | None = Field(
        None, description="Serve's AutoscalingConfig, instead of replicas"
    )
    health_period_s: float = Field(2.0, gt=0, description="seconds between two checks of an engine's /health")
    load_period_s: float = Field(1.0, gt=0, description="seconds between two reports of an engine's load")
    chunk_bytes: int = Field(256, ge=16, description="bytes of a prompt that a router compares as one chunk")
    index_chunks: int = Field(32_768, ge=1, description="chunks that a router remembers for each engine")
    balance_percent: int = Field(
        125, ge=100, description="maximum load, in percent of the mean, at which an engine is chosen for a prefix"
    )
    balance_slack: int = Field(
        4, ge=0, description="the same limit in requests above the mean; the larger limit applies"
    )

    @field_validator("autoscaling_config", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as exc:
            raise ValueError(f"it must be a JSON object with the fields of Serve's AutoscalingConfig ({exc})") from exc


def read_options(
    arguments: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> tuple[ServerSettings, AppOptions]:
    """Read the engine's settings and the application's options. Raises ConfigError, which names the argument."""
    for name, why in _NOT_OF_REPLICAS.items():
        if name in arguments:
            raise ConfigError(f"{name} cannot be set for an engine under Serve, got {arguments[name]!r}: {why}")
    fields = AppOptions.model_fields
    known = {*fields, *ServerSettings.model_fields}
    for name in arguments.keys() - known:
        raise ConfigError(
            f"{name} is neither an option of the application nor a setting of an engine, got {arguments[name]!r}; "
            f"the options are {', '.join(fields)}, and the settings those of `engine serve --help`, with underscores"
        )
    variables = _variables(environment)
    given = {name: value for name, value in arguments.items() if name in fields}
    try:
        options = AppOptions.model_validate(variables | given)
    except ValidationError as exc:
        raise ConfigError(
            "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in exc.errors())
        ) from exc
    engines = {name: value for name, value in arguments.items() if name not in fields}
    settings = read_settings(engines, environment)
    if settings.role != "both":
        raise ConfigError(
            f"role must be 'both' under Serve, got {settings.role!r}: all replicas are alike; start prefill and "
            "decode engines with `engine serve` and put `engine route` in front"
        )
    for sentence in unread_variables(environment):
        logger.warning("%s", sentence)
    return settings.model_copy(update=_OWN), options


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the options in the environment. Raises ConfigError for an unknown variable with ENGINE_SERVE_."""
    named = {f"{VARIABLE_PREFIX}{name.upper()}": name for name in AppOptions.model_fields}
    for variable in environment:
        if variable.startswith(VARIABLE_PREFIX) and variable not in named:
            raise ConfigError(f"{variable} is not an option of the application; the options are {', '.join(named)}")
    return {name: environment[variable] for variable, name in named.items() if environment.get(variable)}
