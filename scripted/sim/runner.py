"""The sim tier: the same loop, gate and scripts over a simulated pipeline and simulated clients, in one process.

No torch, no HTTP, no sockets; a script takes milliseconds. Its front end is played with the real one's own rules for
bodies, text and stop strings.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.scheduler import Scheduler, run_loop
from scripted.errors import Overdue, ScriptError, ScriptFailed, ScriptTimeout, ServerDied, ServerDirty
from scripted.gallery import mutant_named
from scripted.gate.run import ScriptRun, ScriptSucceeded, kind_of
from scripted.gate.scripted_gate import ScriptedGate
from scripted.refusals import ScriptDefinitionError
from scripted.report.failure import FailureKind, FailureReport
from scripted.rig.rig import Rig
from scripted.script.decorator import ScriptedTest, ScriptFunction
from scripted.script.options import ScriptOptions
from scripted.sim.limits import simulated_limits
from scripted.sim.watchdog import watchdog
from scripted.sim.world import SimWorld

__all__ = ["ScriptedSim"]


class _OneRun:
    """A source of one script, which keeps how it ended."""

    warms_up = False

    def __init__(self, run: ScriptRun, mutant: str | None, config: EngineConfig) -> None:
        self._next: ScriptRun | None = run
        self._mutant = mutant
        self._config = config
        self.success: ScriptSucceeded | None = None
        self.error: ScriptError | None = None

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def next_run(self) -> ScriptRun | None:
        run, self._next = self._next, None
        return run

    def progress(self, rig: Rig, run: ScriptRun | None) -> None:
        pass

    def ended(self, rig: Rig, run: ScriptRun | None) -> None:
        del rig
        assert run is not None
        self.success = run.succeeded()

    def failed(self, rig: Rig, run: ScriptRun | None, exc: Exception) -> None:
        kind = kind_of(exc)
        self.error = _ERROR_OF[kind](self._report(rig, run, exc, kind))
        self.error.__cause__ = exc

    def crashed(self, rig: Rig, run: ScriptRun | None, exc: BaseException) -> None:
        """The scheduler died; keep that."""
        if isinstance(exc, Overdue):
            self.error = ScriptTimeout(self._report(rig, run, exc, FailureKind.TIMEOUT))
        else:
            self.error = ServerDied(self._report(rig, run, exc, FailureKind.DIED))
        self.error.__cause__ = exc

    def _report(self, rig: Rig, run: ScriptRun | None, exc: BaseException, kind: FailureKind) -> FailureReport:
        assert run is not None
        report = run.report(rig, exc, kind=kind, mutant=self._mutant)
        return msgspec.structs.replace(report, config=config_text(self._config))


_ERROR_OF = {
    FailureKind.FAILED: ScriptFailed,
    FailureKind.TIMEOUT: ScriptTimeout,
    FailureKind.DIED: ServerDied,
    FailureKind.DIRTY: ServerDirty,
}


def config_text(config: EngineConfig) -> str:
    """The fields of a configuration that are not at their default."""
    values = config.model_dump()
    changed = {name: value for name, value in values.items() if value != type(config).model_fields[name].default}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "the default configuration"


class ScriptedSim:
    """Runs scripts in the sim tier. Every script gets a scheduler and a pipeline of its own."""

    def __init__(self, config: EngineConfig, *, mutant: str | None = None) -> None:
        self.config = config
        self._limits = simulated_limits(config)
        self._mutant = mutant
        self._open = True

    @classmethod
    def start(cls, config: EngineConfig, *, mutant: str | None = None) -> AbstractContextManager[ScriptedSim]:
        """A sim for this configuration; ``mutant`` switches one of the gallery's bugs on."""
        return cls(config, mutant=mutant)

    def run(
        self,
        script: ScriptFunction,
        *args: Any,
        timeout_s: float = ScriptOptions().timeout_s,
        options: ScriptOptions | None = None,
        **kwargs: Any,
    ) -> ScriptSucceeded:
        """Run a generator function that takes ``t``. Raises ScriptFailed, ScriptTimeout, ServerDied or ServerDirty."""
        if not self._open:
            raise EngineError("this sim was shut down; start another one")
        spec = getattr(script, "scripted", None)
        script = spec.script if isinstance(spec, ScriptedTest) else script
        if not inspect.isgeneratorfunction(script):
            raise ScriptDefinitionError(f"{script!r} is no generator function; a script yields once for each step")
        options = options or ScriptOptions(timeout_s=timeout_s)
        source = _OneRun(ScriptRun(script, args, kwargs, options), self._mutant, self.config)
        with ExitStack() as stack:
            if self._mutant is not None:
                stack.enter_context(mutant_named(self._mutant).switched_on())
            stack.enter_context(watchdog(options.timeout_s))
            self._run_loop(source)
        if source.error is not None:
            raise source.error
        assert source.success is not None
        return source.success

    def _run_loop(self, source: _OneRun) -> None:
        scheduler, world = Scheduler(self._limits), SimWorld(self._limits)
        gate = ScriptedGate(scheduler, world, source)
        try:
            run_loop(gate, scheduler, world.pipeline, world.clients)
        except Exception:
            if source.error is None:
                raise

    def shutdown(self) -> None:
        """Refuse further scripts; idempotent."""
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
