"""``@scripted``: turns a script into an ordinary pytest test.

Refuses at decoration a function that could never work as a script. The scheduler process finds the script by file and
name; it stays reachable as ``test.scripted.script``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.core.adapters import adapter_for, adapter_named
from scripted.core.phrases import nearest
from scripted.core.refusals import ScriptDefinitionError
from scripted.script.harness import PLACEMENTS, TIERS, default_tiers, sims_of
from scripted.script.options import DEFAULT_MAX_STEPS, DEFAULT_TIMEOUT_S, ScriptOptions, windows_of
from scripted.script.scripted_test import ScriptedTest
from scripted.script.source import code_of, file_of, idle_statements

TIER_PARAMETER: Final = "scripted_tier"

_defined: dict[tuple[str, str], int] = {}


TestRunner = Callable[[ScriptedTest, str, dict[str, object]], None]


def _no_runner(test: ScriptedTest, tier: str, arguments: dict[str, object]) -> None:
    del tier, arguments
    raise ScriptDefinitionError(f"{test.script.__name__} is a pytest test; run it with pytest, or with 'scripted run'")


_run_test: TestRunner = _no_runner


def run_tests_with(runner: TestRunner) -> None:
    """Set the function that runs decorated tests when they are called."""
    global _run_test
    _run_test = runner


def scripted(
    config: object = None,
    *,
    adapter: str | None = None,
    tiers: Sequence[str] = TIERS,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_steps: int = DEFAULT_MAX_STEPS,
    oracle: bool = True,
    must_reach: Sequence[str] = (),
    placement: str = "local",
    **settings: object,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a generator function as a pytest test on an engine of this configuration, once in each tier.

    The function takes ``t`` first, then fixtures and parameters like any test. The configuration's type selects the
    adapter unless ``adapter`` names one; a named adapter takes ``settings`` in place of a configuration. Without
    ``tiers`` the script runs in sim, and also on servers if the adapter's start quickly. ``oracle=False`` skips the
    comparison with each request run alone. ``placement`` says where the stages of the server tier run. Raises
    ScriptDefinitionError, with the reason, for anything that cannot be a script.
    """
    _check_tiers(tiers)
    named = _adapter_of(config, settings) if adapter is None else _checked_name(adapter)
    if placement not in PLACEMENTS:
        raise ScriptDefinitionError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    options = ScriptOptions(
        timeout_s=timeout_s,
        max_steps=max_steps,
        oracle=oracle,
        must_reach=windows_of(must_reach),
        must_step=True,
        must_assert=True,
    )

    def decorate(given: Callable[..., object]) -> Callable[..., None]:
        function: Callable[..., Any] = given.__func__ if isinstance(given, staticmethod) else given
        instance, parameters = _check_script(function)
        name = _from_here(named, file_of(function))
        runs = sims_of(name)
        chosen = default_tiers(adapter_named(name)) if tiers is TIERS else tuple(tiers)
        made = ScriptedTest(
            config=_config_of(name, config, settings),
            adapter=name,
            tiers=chosen,
            options=options,
            script=function,
            placement=placement,
        )
        runs.check_script(made.config, tiers=chosen, oracle=oracle, placement=placement)
        return _test_function(function, made, instance, parameters)

    return decorate


def _checked_name(adapter: object) -> str:
    if not isinstance(adapter, str):
        raise ScriptDefinitionError(f"adapter is the name of an adapter, got {adapter!r}; write adapter='FILE.py'")
    return adapter


def _test_function(
    function: Callable[..., object],
    made: ScriptedTest,
    instance: Sequence[inspect.Parameter],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Make the function that pytest calls, with the parameters before and after ``t`` and the tier."""

    @functools.wraps(function)
    def test(*instances: object, **arguments: object) -> None:
        __tracebackhide__ = True
        tier = arguments.pop(TIER_PARAMETER, None)
        spec = spec_of(test)
        if not isinstance(tier, str):
            raise ScriptDefinitionError(
                f"{function.__qualname__} was called, but not in a tier; let pytest run it as a function or method of "
                "a plain class, not of a unittest.TestCase, or give it to run() of a ScriptedSim or a ScriptedServer"
            )
        if instances:
            owner = instances[0] if isinstance(instances[0], type) else type(instances[0])
            spec = msgspec.structs.replace(spec, script=method_of(owner, function))
        _run_test(spec, tier, arguments)

    tier = inspect.Parameter(TIER_PARAMETER, inspect.Parameter.KEYWORD_ONLY)
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    test.__dict__.update(__signature__=inspect.Signature([*instance, *keyword_only, tier]), scripted=made)
    return test if instance or "." not in function.__qualname__ else _static(test)


def test_of(found: object) -> ScriptedTest | None:
    """Return the test that ``@scripted`` made from a function; None for any other object."""
    spec = getattr(found, "scripted", None)
    return spec if isinstance(spec, ScriptedTest) else None


def spec_of(test: Callable[..., object]) -> ScriptedTest:
    """Return the test that ``@scripted`` made from a function. Raises ScriptDefinitionError for any other function."""
    spec = test_of(test)
    if spec is None:
        raise ScriptDefinitionError(
            f"{getattr(test, '__name__', test)!r} is not a script; decorate it with @scripted(config)"
        )
    return spec


def _adapter_of(config: object, settings: Mapping[str, object]) -> str:
    """Name the adapter whose configurations have this type. Raises ScriptDefinitionError."""
    if config is None or inspect.isfunction(config):  # a function is a script decorated without parentheses
        raise ScriptDefinitionError(
            "@scripted takes a configuration; write @scripted(EngineConfig(...)) above the function, or "
            "@scripted(adapter=...) for another scheduler"
        )
    name = adapter_for(config)
    for setting in settings:
        known = [option for option in inspect.signature(scripted).parameters if option not in ("config", "settings")]
        raise ScriptDefinitionError(
            f"@scripted has no option {setting!r}{nearest(setting, known)}; it has {', '.join(known)}, and settings of "
            f"an engine belong in its {type(config).__name__}"
        )
    return name


def _config_of(name: str, config: object, settings: Mapping[str, object]) -> object:
    """Return the given configuration, or make one from settings."""
    adapter = adapter_named(name)
    if config is None:
        return adapter.read_config({setting: str(value) for setting, value in settings.items()})
    kind = type(adapter.read_config({}))
    if settings or not isinstance(config, kind):
        raise ScriptDefinitionError(
            f"@scripted(adapter={name!r}) takes settings by name, or one {kind.__name__}; "
            f"got {config!r}{' and settings' if settings else ''}"
        )
    return config


def _from_here(name: str, file: str) -> str:
    """Find an adapter's file in the working folder, or in a folder above the test's file."""
    if not name.endswith(".py") or Path(name).is_file():
        return name
    beside = (folder / name for folder in Path(file).resolve().parents)
    return next((str(path) for path in beside if path.is_file()), name)


def _check_tiers(tiers: Sequence[str]) -> None:
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers or isinstance(tiers, str) or len(set(tiers)) != len(tiers):
        raise ScriptDefinitionError(f"tiers must be a tuple of some of {TIERS}, each once, got {tiers!r}")


def method_of(owner: type, function: Callable[..., object]) -> Callable[..., object]:
    """Bind a method as a script to a new object of its class, which no fixture and no ``__init__`` has touched.

    The scheduler's process can make such an object too, so the script is the same in both tiers. A class method is
    bound to its class.
    """
    if isinstance(inspect.getattr_static(owner, function.__name__, None), classmethod):
        return types.MethodType(function, owner)
    return types.MethodType(function, object.__new__(owner))


def _static(test: Callable[..., None]) -> Callable[..., None]:
    static = staticmethod(test)
    static.__dict__.update(test.__dict__)
    return static


def _check_script(function: Callable[..., object]) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Split a script's parameters into those before ``t``, for a method, and those after it.

    Raises ScriptDefinitionError for a function that cannot run inside the scheduler process.
    """
    if not inspect.isfunction(function):
        raise ScriptDefinitionError(f"@scripted decorates functions, got {function!r}")
    code = code_of(function)
    where = f"{code.co_filename}:{code.co_firstlineno}: {function.__qualname__}"
    _check_kind(function, where)
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    first = 1 if "." in function.__qualname__ and names[:1] != ["t"] else 0
    if names[first : first + 1] != ["t"]:
        raise ScriptDefinitionError(f"{where} must take t as its first parameter, it takes {names}")
    idle = next(idle_statements(function), None)
    if idle is not None:
        raise ScriptDefinitionError(f"{where} tests nothing in {idle}")
    _check_unique(function, where)
    return parameters[:first], parameters[first + 1 :]


def _check_kind(function: types.FunctionType, where: str) -> None:
    """Raise ScriptDefinitionError unless this is a named generator function that another process can find."""
    if function.__name__ == "<lambda>":
        raise ScriptDefinitionError(
            f"{where} is a lambda; the scheduler process finds a script by its name, so give it one"
        )
    if "<locals>" in function.__qualname__:
        raise ScriptDefinitionError(
            f"{where} is defined inside a function; the scheduler process finds a script by its name, "
            "so define it at the top of the file, or in a class there"
        )
    if not inspect.isgeneratorfunction(function) and inspect.isgeneratorfunction(inspect.unwrap(function)):
        raise ScriptDefinitionError(
            f"{where} is wrapped by a decorator that is not a generator function, so it would never run a step; "
            "write 'yield from' in the decorator, or put it above @scripted"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ScriptDefinitionError(
            f"{where} is async, and nothing awaits a script: each of its yields lets the scheduler make one step; "
            "write it without async, and 'yield from' where it awaits"
        )
    if not inspect.isgeneratorfunction(function):
        raise ScriptDefinitionError(
            f"{where} never yields, so it would never run a step; a script is a generator function"
        )


def _check_unique(function: Callable[..., object], where: str) -> None:
    key, line = (file_of(function), function.__qualname__), code_of(function).co_firstlineno
    before = _defined.setdefault(key, line)
    if before != line and ("." in function.__qualname__ or function.__globals__.get(function.__name__) is not None):
        raise ScriptDefinitionError(
            f"{where} is defined before, in line {before}; the first one would never run: rename one"
        )
    _defined[key] = line
