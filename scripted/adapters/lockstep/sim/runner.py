"""The sim tier: the same loop, gate and scripts over a simulated pipeline and simulated clients, in one process.

No torch, no HTTP, no sockets; a script takes milliseconds. Its front end is played with the real one's own rules for
bodies, text and stop strings.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.scheduler import Scheduler, run_loop
from scripted.adapters.lockstep.bugs import mutant_named
from scripted.adapters.lockstep.sim.limits import simulated_limits
from scripted.adapters.lockstep.sim.watchdog import watchdog
from scripted.adapters.lockstep.sim.world import SimWorld
from scripted.errors import Overdue, ScriptError
from scripted.gate.run import ScriptRun, ScriptSucceeded, kind_of
from scripted.gate.script_runner import ScriptRunner, error_of
from scripted.gate.scripted_gate import ScriptedGate
from scripted.report.failure import FailureKind
from scripted.rig.rig import Rig
from scripted.script.decorator import ScriptFunction
from scripted.script.options import ScriptOptions

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
        self._fail(rig, run, exc, kind_of(exc))

    def crashed(self, rig: Rig, run: ScriptRun | None, exc: BaseException) -> None:
        """The scheduler died; keep that."""
        self._fail(rig, run, exc, FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.DIED)

    def _fail(self, rig: Rig, run: ScriptRun | None, exc: BaseException, kind: FailureKind) -> None:
        assert run is not None
        report = run.report(rig, exc, kind=kind, mutant=self._mutant)
        self.error = error_of(report, self._config, self._mutant)
        self.error.__cause__ = exc


class ScriptedSim(ScriptRunner):
    """Runs scripts in the sim tier. Every script gets a scheduler and a pipeline of its own."""

    def __init__(self, config: EngineConfig, *, mutant: str | None = None) -> None:
        super().__init__(config, mutant=mutant)
        self._limits = simulated_limits(config)
        self._open = True

    @classmethod
    def start(cls, config: EngineConfig, *, mutant: str | None = None) -> AbstractContextManager[ScriptedSim]:
        """A sim for this configuration; ``mutant`` switches one of the gallery's bugs on."""
        return cls(config, mutant=mutant)

    def _run(
        self, script: ScriptFunction, args: tuple[Any, ...], kwargs: dict[str, Any], options: ScriptOptions
    ) -> ScriptSucceeded:
        if not self._open:
            raise EngineError("this sim was shut down; start another one")
        source = _OneRun(ScriptRun(script, args, kwargs, options), self.mutant, self.config)
        with ExitStack() as stack:
            if self.mutant is not None:
                stack.enter_context(mutant_named(self.mutant).switched_on())
            stack.enter_context(watchdog(options.timeout_s))
            self._run_loop(source)
        if source.error is not None:
            raise source.error
        assert source.success is not None
        return source.success

    def _run_loop(self, source: _OneRun) -> None:
        scheduler, world = Scheduler(self._limits), SimWorld(self._limits, self.config.model)
        gate = ScriptedGate(scheduler, world, source)
        try:
            run_loop(gate, scheduler, world.pipeline, world.clients)
        except Exception:
            if source.error is None:
                raise

    def shutdown(self) -> None:
        """Refuse further scripts; idempotent."""
        self._open = False
