"""Runs scripts, and reports their ends, in the same way in both tiers.

A tier says what it runs a script on. This module starts nothing.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import msgspec

from engine.core.config import EngineConfig
from scripted.core.base_adapter import config_text
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import FailureReport, ScriptError
from scripted.report.failure import error_of as error_of_report
from scripted.script.decorator import ScriptedTest, ScriptFunction
from scripted.script.options import ScriptOptions
from scripted_lockstep.configs import config_values
from scripted_lockstep.script.execution import ScriptSucceeded


class ScriptRunner(ABC):
    """Runs scripts on engines of one configuration, with one bug of the gallery or none; a context manager."""

    def __init__(self, config: EngineConfig, *, mutant: str | None) -> None:
        self.config = config
        self.mutant = mutant
        # The test that ran on it last.
        self.used_by = ""

    def run(
        self,
        script: ScriptFunction,
        *args: Any,
        timeout_s: float = ScriptOptions().timeout_s,
        options: ScriptOptions | None = None,
        **kwargs: Any,
    ) -> ScriptSucceeded:
        """Run a generator function that takes ``t``. Raises ScriptFailed, ScriptTimeout, ServerDied or ServerDirty.

        Raises ScriptDefinitionError for anything but a generator function.
        """
        function: Any = script
        if isinstance(function, functools.partial):
            if function.args:
                raise ScriptDefinitionError(f"{function!r} has arguments before t; give them to run(script, *args)")
            function, kwargs = function.func, function.keywords | kwargs
        spec = getattr(function, "scripted", None)
        function = spec.script if isinstance(spec, ScriptedTest) else function
        if not inspect.isgeneratorfunction(function):
            raise ScriptDefinitionError(f"{function!r} is no generator function; a script yields once for each step")
        return self._run(function, args, kwargs, options or ScriptOptions(timeout_s=timeout_s))

    @abstractmethod
    def _run(
        self, script: ScriptFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: ScriptOptions
    ) -> ScriptSucceeded: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Refuse further scripts and end what runs; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def error_of(report: FailureReport, config: EngineConfig, mutant: str | None) -> ScriptError:
    """Make the error of a report, with the configuration of the run."""
    return error_of_report(msgspec.structs.replace(report, config=config_text(config_values(config)), mutant=mutant))
