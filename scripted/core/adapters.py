"""Looks adapters up by name: an entry point of an installed distribution, a file, or an attribute of a module.

Names no adapter itself. A distribution offers its adapters in the entry-point group ``scripted.adapters``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol, cast, runtime_checkable

from scripted.core.installed import harness_packages, installed_adapters
from scripted.core.protocol import ADAPTER_API, Adapter, StatesApi
from scripted.core.refusals import ScriptDefinitionError

DEFAULT_ADAPTER: Final = "lockstep"
_ATTRIBUTE: Final = "ADAPTER"
# Files below this directory are named relative to it. Fixed at start: a later chdir must not change a name.
_START: Final = Path.cwd().resolve()
_VARIANT: Final = re.compile(r"(?P<adapter>[^+]+)(?P<defaults>(?:\+\w+=[^+]*)+)")


@runtime_checkable
class HasConfiguration(Protocol):
    """An adapter that can be found by the type of its configurations."""

    configuration: type


@runtime_checkable
class OffersNames(Protocol):
    """An adapter that implements names of the script contract with its own types."""

    @property
    def names(self) -> Mapping[str, type]: ...


@runtime_checkable
class HasVariants(Protocol):
    """An adapter that makes variants of itself with other defaults."""

    def variant(self, name: str, defaults: Mapping[str, str]) -> Adapter:
        """Return the adapter called ``name`` with these defaults. Raises ScriptDefinitionError for unknown settings."""
        ...


def variant_name(adapter: str, defaults: Mapping[str, str]) -> str:
    """Name the variant of an adapter with other defaults: ``vllm+policy=priority``."""
    return adapter + "".join(f"+{name}={value}" for name, value in defaults.items())


@functools.cache
def adapter_named(name: str) -> Adapter:
    """Return the adapter of this name, loaded once per process. Raises ScriptDefinitionError if there is none.

    Every path to a file gives the same adapter, named by its path from the directory in which the process started, or
    by its absolute path if it lies elsewhere. ``NAME+SETTING=VALUE`` is a variant with other defaults, which other
    processes find by that name too.
    """
    name = _installed_as(name)
    if name in installed_adapters():
        return cast(Adapter, installed_adapters()[name].load())
    if name.endswith(".py"):
        return _adapter_in_file(_path_of(name), name)
    if (variant := _VARIANT.fullmatch(name)) is not None:
        return _variant(name, **variant.groupdict())
    found = _in_module(name)
    # A schedule's text names its adapter so that another process can load it.
    found.name = name
    return found


def adapter_for(config: object) -> str:
    """Name the first installed adapter whose configurations have this type. Raises ScriptDefinitionError."""
    for name in installed_adapters():
        # An adapter whose engine is not installed cannot be loaded, so the configuration is not one of its own.
        with suppress(ScriptDefinitionError, ImportError):
            adapter = adapter_named(name)
            if isinstance(adapter, HasConfiguration) and isinstance(config, adapter.configuration):
                return name
    raise ScriptDefinitionError(
        f"a script takes an EngineConfig or the configuration of another installed adapter, got {config!r:.200}; "
        "write EngineConfig(...), or name the adapter: adapter='FILE.py'"
    )


def contract_name(name: str) -> type:
    """Return the first installed adapter's type for a name of the script contract.

    Raises ScriptDefinitionError, or the first adapter's error if one could not be loaded.
    """
    refusals: list[ScriptDefinitionError] = []
    for one in installed_adapters():
        try:
            adapter = adapter_named(one)
        except ScriptDefinitionError as exc:
            refusals.append(exc)
        else:
            if isinstance(adapter, OffersNames) and name in adapter.names:
                return adapter.names[name]
    if refusals:
        raise refusals[0]
    raise ScriptDefinitionError(f"no installed adapter offers {name}; there are {', '.join(installed_adapters())}")


def _installed_as(name: str) -> str:
    """Resolve ``MODULE:NAME`` to the name of an installed adapter; return any other name unchanged."""
    return next((entry.name for entry in installed_adapters().values() if entry.value == name), name)


def _in_module(name: str) -> Adapter:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ScriptDefinitionError(f"{_where()}; got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ScriptDefinitionError(f"the adapter {name!r} cannot be loaded: {exc}{_hidden(exc)}; {_where()}") from exc
    return _checked(found, name)


def _variant(name: str, adapter: str, defaults: str) -> Adapter:
    base = adapter_named(adapter)
    if not isinstance(base, HasVariants):
        raise ScriptDefinitionError(f"the adapter {adapter} has no variants with other defaults, got {name!r}")
    if base.name != adapter:
        return adapter_named(base.name + defaults)
    return base.variant(name, dict(pair.split("=", 1) for pair in defaults.split("+")[1:]))


def _path_of(name: str) -> Path:
    for path in (Path(name), _START / name):
        if path.is_file():
            return path.resolve()
    raise ScriptDefinitionError(f"there is no file {name!r} in {Path.cwd()}; give the path of the adapter's file")


def _adapter_in_file(path: Path, name: str) -> Adapter:
    # The file imports its neighbours as a script does, and the project's packages shadow Lockstep's.
    paths_before = list(sys.path)
    for folder in (str(Path.cwd()), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    # Another adapter may have imported the file already. A second module would have its own code, out of reach of
    # mutants that edit the first.
    module = sys.modules.get(path.stem)
    if module is None or module.__file__ != str(path):
        try:
            module = _loaded(name, path)
        except ScriptDefinitionError:
            # Otherwise the next adapter would import this one's neighbours.
            sys.path[:] = paths_before
            raise
    if _ATTRIBUTE not in vars(module):
        raise ScriptDefinitionError(f"the file {name!r} has no {_ATTRIBUTE}; {_where()}")
    found = _checked(vars(module)[_ATTRIBUTE], name)
    found.name = str(path.relative_to(_START) if path.is_relative_to(_START) else path)
    return found


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{name} ends in .py"
    assert spec.loader is not None, f"{name} ends in .py"
    before = sys.modules.get(path.stem)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        del sys.modules[path.stem]
        if before is not None:
            sys.modules[path.stem] = before
        where = next(
            (f", line {at.lineno}" for at in traceback.extract_tb(exc.__traceback__)[::-1] if at.filename == str(path)),
            "",
        )
        raise ScriptDefinitionError(
            f"{name}{where} cannot be loaded: {type(exc).__name__}: {exc}{_hidden(exc)}"
        ) from exc
    return module


def _hidden(exc: Exception) -> str:
    """Return a remedy when an import found Lockstep's package instead of the adapter's own; else nothing."""
    package = (exc.name or "").partition(".")[0] if isinstance(exc, ImportError) else ""
    if package not in ("engine", "lockstep", *harness_packages()):
        return ""
    return f"; {package!r} is Lockstep's package here, so give yours a place inside a package of another name"


def _where() -> str:
    return (
        f"an adapter is {', '.join(installed_adapters())}, a file FILE.py that has one as {_ATTRIBUTE}, or MODULE:NAME "
        "of an installed module"
    )


def _checked(found: object, name: str) -> Adapter:
    lacks = sorted({"actions", "new_parts", "workloads"}.difference(dir(found)))
    if lacks:
        raise ScriptDefinitionError(
            f"{name!r} is not an adapter: it has no {', '.join(lacks)}; make one with scripted.sdk.SchedulerAdapter"
        )
    stated = found.api if isinstance(found, StatesApi) else ADAPTER_API
    if stated != ADAPTER_API:
        raise ScriptDefinitionError(
            f"{name!r} is written for version {stated} of the adapter API, this Lockstep has version {ADAPTER_API}; "
            "update the adapter (CHANGELOG.md says what changed), or install the release that it is for"
        )
    return cast(Adapter, found)
