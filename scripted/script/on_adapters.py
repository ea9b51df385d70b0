"""Protocols of adapters that run scripts, and the lookup of such an adapter by name.

An adapter that is only searched implements none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from scripted.core.adapters import adapter_named
from scripted.core.machine import ConfigIn
from scripted.core.protocol import TestHead
from scripted.core.refusals import ScriptDefinitionError
from scripted.script.options import ScriptOptions

if TYPE_CHECKING:
    from scripted.script.execution import ScriptOutcome


@runtime_checkable
class RunsScripts(Protocol[ConfigIn]):
    """An adapter whose scheduler runs scripts."""

    def run_script(
        self,
        script: Callable[..., Generator[object, None, object]],
        arguments: Mapping[str, object],
        *,
        config: ConfigIn,
        options: ScriptOptions,
        mutant: str | None,
    ) -> ScriptOutcome:
        """Run a generator function that takes ``t`` on a machine of this configuration. Raises ScriptError."""
        ...


@runtime_checkable
class WritesScripts(RunsScripts[ConfigIn], Protocol[ConfigIn]):
    """An adapter that runs scripts and that the harness can write scripts for."""

    def test_head(self, config: ConfigIn, body: str) -> TestHead:
        """Return the lines above the ``body`` of a written test."""
        ...


def script_runner(name: str) -> RunsScripts:
    """Return the adapter of this name. Raises ScriptDefinitionError if it runs no scripts."""
    adapter = adapter_named(name)
    if not isinstance(adapter, RunsScripts):
        raise ScriptDefinitionError(
            f"the adapter {name} runs no scripts; make it with scripted.sdk.SchedulerAdapter, or search it only"
        )
    return adapter
