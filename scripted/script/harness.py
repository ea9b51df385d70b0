"""Harnesses, which run scripts one after another on engines of one configuration in one tier.

``ScriptedSim.start(config)`` and ``ScriptedServer.start(config)`` find the adapter for the configuration through the
protocols below. This file knows no adapter.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    cast,
    runtime_checkable,
)

from scripted.core.adapters import adapter_for, adapter_named
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError
from scripted.script.importing import require_not_importing
from scripted.script.options import ScriptOptions

if TYPE_CHECKING:
    from scripted.script.execution import ScriptOutcome
    from scripted.script.source import ScriptFunction

Tier = Literal["sim", "server"]
TIERS: Final[tuple[Tier, ...]] = ("sim", "server")
# Where the stages of the server tier run: forked beside the scheduler, joined over TCP, or placed by Ray.
PLACEMENTS: Final = ("local", "join", "ray")

ConfigT = TypeVar("ConfigT", covariant=True)
OutcomeT = TypeVar("OutcomeT", bound="ScriptOutcome", covariant=True)


class Harness(ABC, Generic[ConfigT, OutcomeT]):
    """Runs scripts on engines of one configuration, optionally with one mutant; a context manager.

    ``usable`` turns false once an engine has been shut down, died, hung or could not be brought to idle; ``has_failed``
    turns true once a script has failed. ``used_by`` is the test that ran last.
    """

    tier: ClassVar[Tier]

    def __init__(self, config: ConfigT, *, mutant: str | None = None) -> None:
        self.config = config
        self.mutant = mutant
        self.usable = True
        self.has_failed = False
        self.used_by = ""

    def run(
        self,
        script: Callable[..., object],
        *args: object,
        timeout_s: float = ScriptOptions().timeout_s,
        options: ScriptOptions | None = None,
        **kwargs: object,
    ) -> OutcomeT:
        """Run a generator function that takes ``t``.

        Raises ScriptFailed, ScriptTimeout, ServerDied or ServerDirty, and ScriptDefinitionError for any other function.
        """
        if isinstance(script, functools.partial):
            if script.args:
                raise ScriptDefinitionError(f"{script!r} has arguments before t; give them to run(script, *args)")
            partial: functools.partial[object] = script
            script, kwargs = partial.func, partial.keywords | kwargs
        if "scripted" in getattr(script, "__dict__", {}):
            # @scripted wraps the generator function.
            script = inspect.unwrap(script, stop=inspect.isgeneratorfunction)
        if not inspect.isgeneratorfunction(script):
            raise ScriptDefinitionError(f"{script!r} is not a generator function; a script yields once for each step")
        return self._run(script, args, kwargs, options or ScriptOptions(timeout_s=timeout_s))

    @abstractmethod
    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> OutcomeT: ...

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and refuse further scripts; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


class ScriptedSim(Harness[ConfigT, OutcomeT]):
    """The sim tier: every script gets its own simulated engine in this process.

    ``outcome_type`` is the type that ``run`` returns.
    """

    tier = "sim"
    outcome_type: ClassVar[type[ScriptOutcome]]

    def run_isolated(
        self,
        script: Callable[..., Any],
        *args: Any,
        timeout_s: float = ScriptOptions().timeout_s,
        options: ScriptOptions | None = None,
        **kwargs: Any,
    ) -> OutcomeT:
        """Run a script in a forked child, as a decorated test runs, and return the same outcome.

        The child is killed once its time is over, even inside a C call that never returns to Python. Changes that the
        script makes to its process are lost with it. Raises the same exceptions as ``run``.
        """
        from scripted.script.isolation import outcome_isolated  # it needs this module
        from scripted.script.scripted_test import ScriptedTest

        options = options or ScriptOptions(timeout_s=timeout_s)
        name = adapter_for(self.config)
        test = ScriptedTest(config=self.config, adapter=name, tiers=("sim",), options=options, script=script)
        outcome = outcome_isolated(
            test, options, lambda: self.run(script, *args, options=options, **kwargs), self.outcome_type
        )
        return cast("OutcomeT", outcome)

    @classmethod
    def start(
        cls, config: Any, *, mutant: str | None = None, adapter: str | None = None
    ) -> ScriptedSim[object, ScriptOutcome]:
        """Start a sim for this configuration, with the named adapter or the one whose configurations have this type."""
        return sims_of(adapter or adapter_for(config)).start_sim(config, mutant=mutant)


class ScriptedServer(Harness[ConfigT, OutcomeT]):
    """The server tier: one real engine. Scripts run inside its scheduler process."""

    tier = "server"

    @classmethod
    def start(
        cls, config: Any, *, mutant: str | None = None, adapter: str | None = None, placement: str = "local"
    ) -> ScriptedServer[object, ScriptOutcome]:
        """Start a server for this configuration and wait until it is ready for a script.

        ``placement``: where its stages run. Raises ScriptDefinitionError if the adapter has no servers or a server
        imports the calling file, and StartupError if the server does not start.
        """
        require_not_importing()
        name = adapter or adapter_for(config)
        return servers_of(name).start_server(config, mutant=mutant, placement=placement)

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether its processes are still running."""


# -- abilities of adapters --


class ServerPool(Protocol):
    """Servers of one adapter, shared by scripts with equal configurations; a dirty or dead one is replaced."""

    def lend(
        self, config: Any, *, mutant: str | None, placement: str, device: str | None
    ) -> AbstractContextManager[ScriptedServer[object, ScriptOutcome]]:
        """Lend a server while the context is open. ``device``, if given, overrides the configuration's."""
        ...

    def close(self) -> None:
        """End every server."""
        ...


@runtime_checkable
class StartsSims(Protocol):
    """An adapter that runs scripts in the sim tier."""

    def check_script(self, config: Any, *, tiers: tuple[str, ...], oracle: bool, placement: str) -> None:
        """Raise ScriptDefinitionError for options of ``@scripted`` that this adapter's scripts cannot have."""
        ...

    def start_sim(self, config: Any, *, mutant: str | None) -> ScriptedSim[object, ScriptOutcome]: ...


@runtime_checkable
class HasServers(Protocol):
    """An adapter with a server tier. ``starts_quickly``: scripts that name no tier also run there."""

    starts_quickly: bool

    def why_no_servers(self) -> str:
        """Return why no server can be started here, with the remedy; empty if one can."""
        ...

    def start_server(
        self, config: Any, *, mutant: str | None, placement: str
    ) -> ScriptedServer[object, ScriptOutcome]: ...

    def new_servers(self) -> ServerPool: ...


def sims_of(name: str) -> StartsSims:
    """Return the adapter of this name. Raises ScriptDefinitionError if it runs no scripts."""
    adapter = adapter_named(name)
    if not isinstance(adapter, StartsSims):
        raise ScriptDefinitionError(
            f"the adapter {name} runs no scripts; make it with scripted.sdk.SchedulerAdapter, or search it only"
        )
    return adapter


def servers_of(name: str) -> HasServers:
    """Return the adapter of this name. Raises ScriptDefinitionError if it cannot start servers here."""
    adapter = adapter_named(name)
    if not isinstance(adapter, HasServers):
        raise ScriptDefinitionError(f"the adapter {name} has no server tier; use --tier sim")
    if why := adapter.why_no_servers():
        raise ScriptDefinitionError(why)
    return adapter


def default_tiers(adapter: Adapter) -> tuple[Tier, ...]:
    """Return the tiers of a script that names none: without servers if they take minutes to start."""
    return TIERS if isinstance(adapter, HasServers) and adapter.starts_quickly else ("sim",)
