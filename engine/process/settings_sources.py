"""Sources of settings: flags over environment over a file over defaults, with the origin of each field.

Owns the order, and errors that name the origin. Defines no field.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

from engine.core.errors import ConfigError
from engine.process.settings import ServerSettings
from lockstep.broken_rules import nearest

ENVIRONMENT_PREFIX = "ENGINE_"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
DEFAULT = "default"
STANDARD_VARIABLES = {"otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
NEARLY_OURS = 0.9
# Prefixes of variables that belong to others: the application under Ray Serve, and Kubernetes, which describes a
# service named "engine" to each pod.
_OF_OTHERS = re.compile(
    rf"{ENVIRONMENT_PREFIX}(SERVE_\w+|SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)

_READERS: Final[Mapping[str, Callable[[BinaryIO], Any]]] = {
    ".toml": tomllib.load,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.load,
}
_UNREADABLE = (OSError, ValueError, TypeError, tomllib.TOMLDecodeError, yaml.YAMLError, json.JSONDecodeError)


@dataclass(frozen=True)
class TracedSettings:
    """Settings with the origin of each field: a flag, a variable, a file, or the default."""

    settings: ServerSettings
    origins: Mapping[str, str]


@dataclass(frozen=True)
class _Source:
    """Values by field. ``name_of`` returns a field's origin, ``blame`` the beginning of an error about it."""

    values: Mapping[str, Any]
    name_of: Callable[[str], str]
    blame: Callable[[str], str]


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ServerSettings:
    """Read settings from flags (None: not given) over environment variables over a file over defaults.

    Without ``file`` it reads the one that ENGINE_CONFIG names, if any. Raises ConfigError, which names the origin.
    """
    return trace_settings(flags, environment, file).settings


def trace_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> TracedSettings:
    """Read settings with the origin of each field."""
    set_by: dict[str, _Source] = {}
    sources = (_environment_source(environment), _flag_source(flags))
    for source in (_standard_source(environment), *_file_sources(environment, file), *sources):
        set_by |= dict.fromkeys(source.values, source)
    try:
        settings = ServerSettings(**{name: source.values[name] for name, source in set_by.items()})
    except ConfigError as exc:
        raise ConfigError("\n".join(_with_origin(line, set_by) for line in str(exc).splitlines())) from exc
    origins = {name: set_by[name].name_of(name) if name in set_by else DEFAULT for name in ServerSettings.model_fields}
    return TracedSettings(settings, origins)


def _flag_source(flags: Mapping[str, Any]) -> _Source:
    given = {name: value for name, value in flags.items() if value is not None}
    return _Source(given, lambda name: f"--{name.replace('_', '-')}", str)


def _environment_source(environment: Mapping[str, str]) -> _Source:
    """Return the fields that the environment sets, without surrounding spaces; an empty variable counts as unset.

    Raises ConfigError for a misspelled variable of ours, which would otherwise silently leave a default. Other
    variables with our prefix may belong to another program.
    """
    for variable in _unknown(environment):
        near = nearest(variable.upper(), _ours(), cutoff=NEARLY_OURS)
        if near is not None:
            raise ConfigError(f"{variable} must be spelled {near} to be read, or be renamed to be left alone")
    given = {name.upper(): text.strip() for name, text in environment.items() if text.strip()}
    values = {name: given[_variable(name)] for name in ServerSettings.model_fields if _variable(name) in given}
    return _Source(values, _variable, _variable)


def _standard_source(environment: Mapping[str, str]) -> _Source:
    """Return the fields set by variables that other programs read too."""
    given = {field: environment.get(name, "").strip() for field, name in STANDARD_VARIABLES.items()}
    name_of = STANDARD_VARIABLES.__getitem__
    return _Source({field: text for field, text in given.items() if text}, name_of, name_of)


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable with our prefix that sets nothing: another program may need it.

    Variables of Kubernetes and of the application under Ray Serve are left out.
    """
    sentences = []
    for variable in _unknown(environment):
        near = nearest(variable.upper(), _ours())
        perhaps = "" if near is None else f"; the nearest is {near}"
        sentences.append(f"{variable} sets nothing: the engine has no such setting{perhaps}")
    return sentences


def _unknown(environment: Mapping[str, str]) -> list[str]:
    """Return the variables with our prefix, in upper or lower case, that neither we nor a known program read."""
    ours = set(_ours())
    names = [name for name in environment if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in ours]
    return sorted(name for name in names if _OF_OTHERS.fullmatch(name.upper()) is None)


def _ours() -> list[str]:
    return [CONFIG_VARIABLE, *map(_variable, ServerSettings.model_fields)]


def _file_sources(environment: Mapping[str, str], file: Path | None) -> list[_Source]:
    named = environment.get(CONFIG_VARIABLE, "").strip()
    path = file or (Path(named) if named else None)
    if path is None:
        return []
    values = _read_file(path)
    return [_Source(values, lambda _: str(path), lambda name: f"{path}: {name}")]


def _read_file(path: Path) -> dict[str, Any]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"the configuration file must end in {', '.join(_READERS)}, got {path}; rename or convert it")
    if not path.is_file():
        raise ConfigError(f"the configuration file must exist, got {path}; check --config and {CONFIG_VARIABLE}")
    try:
        with path.open("rb") as file:
            values = reader(file) or {}
        if isinstance(values, dict):
            return values
        why = f"it is a {type(values).__name__}"
    except _UNREADABLE as exc:
        why = " ".join(str(exc).split())
    rule = f"must be readable {path.suffix[1:]} with one value a field"
    raise ConfigError(f"{path} {rule}, but: {why}; correct it there")


def _with_origin(line: str, set_by: Mapping[str, _Source]) -> str:
    """Put the origin in front of an error line that starts with a field."""
    name = line.partition(" ")[0]
    return f"{set_by[name].blame(name)}{line.removeprefix(name)}" if name in set_by else line


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"
