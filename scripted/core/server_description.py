"""Describes an adapter's server: the command line for its settings, its defaults, and the settings that are sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, runtime_checkable

import msgspec
from typing_extensions import TypeVar

from scripted.core.protocol import Adapter, ConfigValue

_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct, default=Any)


class ServeLine(msgspec.Struct, frozen=True):
    """The command line of a server with some settings.

    ``changed``: the flags whose values differ from the default, each with the default. ``beside`` lists the settings
    that no flag sets: properties of the model, of a connector, of the simulated device.
    """

    line: str
    changed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class ServerDescription(Generic[_SettingsT]):
    """Describes the server whose scheduler an SDK adapter drives; by itself, an adapter without a server.

    ``defaults``: settings whose default on the server differs from the adapter's. ``sizes``: numbers that a simulation
    keeps small, so that no value is unusual; ``token_counts``: the sizes in tokens. ``block_size`` names the setting
    for the size of a block, ``switches`` the settings that make an engine asynchronous. ``issue_form``: the headings of
    the project's bug report form, each with the parts of a report that it asks for
    (``scripted.report.issue.IssuePart``).
    """

    defaults: ClassVar[Mapping[str, ConfigValue]] = {}
    sizes: ClassVar[Sequence[str]] = ()
    token_counts: ClassVar[Sequence[str]] = ()
    block_size: ClassVar[str] = ""
    switches: ClassVar[Sequence[str]] = ()
    issue_form: ClassVar[Sequence[tuple[str, Sequence[str]]]] = ()

    def command(self, config: _SettingsT) -> ServeLine | None:
        """Return the command line of a server with these settings; None where there is no such server."""
        del config
        return None

    def unusual(self, config: _SettingsT) -> Mapping[str, ConfigValue]:
        """Return the settings that differ from the server's defaults, without sizes."""
        given, usual = msgspec.structs.asdict(config), self._usual(config)
        return {name: value for name, value in given.items() if name not in self.sizes and value != usual[name]}

    def usual_configs(self, config: _SettingsT) -> Iterator[tuple[str, _SettingsT]]:
        """Yield configurations with one of these settings at the server's default, each with a description."""
        usual = self._usual(config)
        for name in self.unusual(config):
            with suppress(ValueError):
                yield f"{name}={usual[name]} (the default)", msgspec.structs.replace(config, **{name: usual[name]})

    def scaled(self, config: _SettingsT, factor: int) -> _SettingsT | None:
        """Return the configuration with every token count multiplied by ``factor``; None if it is refused."""
        given = msgspec.structs.asdict(config)
        with suppress(ValueError):
            if self.token_counts:
                return msgspec.structs.replace(config, **{name: given[name] * factor for name in self.token_counts})
        return None

    def other_configs(self, config: _SettingsT) -> Iterator[tuple[str, _SettingsT]]:
        """Yield, with a description, configurations with another block size, or asynchronous instead of synchronous."""
        given = msgspec.structs.asdict(config)
        others: list[tuple[str, ConfigValue]] = [(name, not given[name]) for name in self.switches]
        if self.block_size:
            size = given[self.block_size]
            others += [(self.block_size, value) for value in (size // 2, 2 * size) if value]
        for name, value in others:
            with suppress(ValueError):
                yield f"{name}={value}", msgspec.structs.replace(config, **{name: value})

    def _usual(self, config: _SettingsT) -> dict[str, ConfigValue]:
        return {**msgspec.structs.asdict(type(config)()), **self.defaults}


class UndescribedServer(ServerDescription[_SettingsT]):
    """Stands in for a server that the adapter does not describe: it knows only the words of its configurations."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def unusual(self, config: _SettingsT) -> Mapping[str, ConfigValue]:
        return self._adapter.config_words(config)

    def usual_configs(self, config: _SettingsT) -> Iterator[tuple[str, _SettingsT]]:
        words = {name: str(value) for name, value in self.unusual(config).items()}
        for name in words:
            with suppress(ValueError):
                usual = self._adapter.read_config({other: value for other, value in words.items() if other != name})
                if name not in self.unusual(usual):
                    yield f"{name} at its default", usual

    def scaled(self, config: _SettingsT, factor: int) -> _SettingsT | None:
        """Return None: which settings are counts of tokens is unknown."""
        del config, factor
        return None

    def other_configs(self, config: _SettingsT) -> Iterator[tuple[str, _SettingsT]]:
        del config
        return iter(())


@runtime_checkable
class DescribesServer(Protocol):
    """An adapter that describes the server of its configurations."""

    @property
    def server(self) -> ServerDescription: ...
