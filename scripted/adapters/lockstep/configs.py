"""Configurations of the engine as words of a schedule, and the limits that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.limits import Limits
from scripted.adapters.lockstep.sim.limits import simulated_limits


def config_values(config: EngineConfig) -> dict[str, Any]:
    """The fields that are not at their default."""
    fields = type(config).model_fields
    return {name: value for name, value in config.model_dump().items() if value != fields[name].default}


def limits_of(config: EngineConfig) -> Limits:
    """A configuration resolved as in the sim tier: against the embedded model, or a folder's ``config.json``.

    Raises CheckpointError for a model that is no folder with a configuration, ConfigError for what it cannot do.
    """
    return simulated_limits(config)


def smaller_configs(config: EngineConfig) -> Iterator[EngineConfig]:
    """One setting at its default; a number nearer to it from above, or lower by half or by one."""
    values = config_values(config)
    for name, value in values.items():
        default = EngineConfig.model_fields[name].default
        smaller = [default]
        if type(value) is int and value > 1:
            smaller += [default + (value - default) // 2] if isinstance(default, int) and value > default else []
            smaller += [value // 2, value - 1]
        for less in dict.fromkeys(smaller):
            if less != value:
                with suppress(ConfigError):
                    yield EngineConfig(**{**values, name: less})
