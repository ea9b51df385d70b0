"""``@scripted``: makes an ordinary pytest test of a script.

Refuses, where it is decorated, what could never work as one. The script itself stays reachable as ``test.script``,
which is how the scheduler process finds it by file and name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import msgspec

from engine.config import EngineConfig
from scripted.errors import ScriptDefinitionError
from scripted.script.options import DEFAULT_MAX_STEPS, DEFAULT_TIMEOUT_S, ScriptOptions

__all__ = [
    "TIERS",
    "TIER_PARAMETER",
    "ScriptFunction",
    "ScriptedTest",
    "TestRunner",
    "run_tests_with",
    "scripted",
    "spec_of",
]

TIERS: Final = ("sim", "server")
TIER_PARAMETER: Final = "scripted_tier"

ScriptFunction = Callable[..., Generator[Any, None, Any]]

_defined: dict[tuple[str, str], int] = {}


class ScriptedTest(msgspec.Struct, frozen=True, kw_only=True):
    """What a decorated test is: its configuration, tiers and options, and the generator function itself."""

    config: EngineConfig
    tiers: tuple[str, ...]
    options: ScriptOptions
    script: Callable[..., Any]

    @property
    def file(self) -> str:
        """The file that defines it."""
        return self.script.__code__.co_filename


TestRunner = Callable[[ScriptedTest, str, dict[str, Any]], None]


def _no_runner(test: ScriptedTest, tier: str, arguments: dict[str, Any]) -> None:
    del tier, arguments
    raise ScriptDefinitionError(f"{test.script.__name__} is a pytest test; run it with pytest, or with 'scripted run'")


_run_test: TestRunner = _no_runner


def run_tests_with(runner: TestRunner) -> None:
    """Decorated tests that are called from now on are run by this function: with a test, its tier and its arguments."""
    global _run_test
    _run_test = runner


def scripted(
    config: EngineConfig,
    *,
    tiers: Sequence[str] = TIERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_steps: int = DEFAULT_MAX_STEPS,
    oracle: bool = True,
    must_reach: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a generator function as a pytest test on an engine of this configuration, once in each tier.

    The function takes ``t`` first, then fixtures and parameters as any test does. ``oracle=False`` leaves out the
    comparison with each request run alone. Raises ScriptDefinitionError, with the reason, for what cannot be a script.
    """
    _check_arguments(config, tiers, must_reach)
    options = ScriptOptions(timeout_s=timeout_s, max_steps=max_steps, oracle=oracle, must_reach=tuple(must_reach))

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        parameters = _check_script(function)

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            tier = arguments.pop(TIER_PARAMETER)
            _run_test(spec_of(test), tier, arguments)

        tier = inspect.Parameter(TIER_PARAMETER, inspect.Parameter.KEYWORD_ONLY)
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        test.__signature__ = inspect.Signature([*keyword_only, tier])  # type: ignore[attr-defined]
        test.scripted = ScriptedTest(config=config, tiers=tuple(tiers), options=options, script=function)  # type: ignore[attr-defined]
        return test

    return decorate


def spec_of(test: Callable[..., Any]) -> ScriptedTest:
    """What ``@scripted`` made of a function. Raises ScriptDefinitionError for a function that it did not decorate."""
    spec = getattr(test, "scripted", None)
    if not isinstance(spec, ScriptedTest):
        raise ScriptDefinitionError(
            f"{getattr(test, '__name__', test)!r} is not a script; decorate it with @scripted(config)"
        )
    return spec


def _check_arguments(config: EngineConfig, tiers: Sequence[str], must_reach: Sequence[str]) -> None:
    if not isinstance(config, EngineConfig):
        raise ScriptDefinitionError(
            f"@scripted takes an EngineConfig, got {config!r}; write @scripted(EngineConfig(...)) above the function"
        )
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers or isinstance(tiers, str):
        raise ScriptDefinitionError(f"tiers must be a tuple of some of {TIERS}, got {tiers!r}")
    if isinstance(must_reach, str) or not all(isinstance(name, str) and name for name in must_reach):
        raise ScriptDefinitionError(
            f"must_reach must be a list of names that t.sometimes() is given, got {must_reach!r}; write ['window']"
        )


def _check_script(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The script's parameters behind ``t``; raises for what cannot run inside the scheduler process."""
    if not inspect.isfunction(function):
        raise ScriptDefinitionError(f"@scripted decorates functions, got {function!r}")
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {function.__qualname__}"
    if function.__name__ == "<lambda>":
        raise ScriptDefinitionError(
            f"{where} is a lambda; the scheduler process finds a script by its name, so give it one"
        )
    if "." in function.__qualname__:
        raise ScriptDefinitionError(
            f"{where} is defined inside a function or a class; the scheduler process finds a script by its name, "
            "so define it at the top of the file"
        )
    if not inspect.isgeneratorfunction(function):
        raise ScriptDefinitionError(
            f"{where} never yields, so it would never run a step; a script is a generator function"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].name != "t":
        raise ScriptDefinitionError(
            f"{where} must take t as its first parameter, it takes {[p.name for p in parameters]}"
        )
    _check_unique(function, where)
    return parameters[1:]


def _check_unique(function: Callable[..., Any], where: str) -> None:
    key, line = (function.__code__.co_filename, function.__name__), function.__code__.co_firstlineno
    before = _defined.setdefault(key, line)
    if before != line and function.__globals__.get(function.__name__) is not None:
        raise ScriptDefinitionError(
            f"{where} is defined before, in line {before}; the first one would never run: rename one"
        )
    _defined[key] = line
