"""Scripts of one engine with a role in the server tier: its processes are real, the script runs in the test's process.

The engine at the other end of its transfers is imaginary, as in the sim tier; its KV is real.
"""

from __future__ import annotations

import contextlib
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import zmq

from engine.core.config import EngineConfig, embedded_seed
from engine.core.scheduler import Scheduler, StepResult
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent
from scripted.core.clock import VirtualClock
from scripted.core.violation import Violation
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.frames import definition_of
from scripted.script.execution import OneScript
from scripted.script.harness import ScriptedServer
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction, file_of
from scripted_lockstep.actions.client_requests import DECODE_ENGINE, PREFILL_ENGINE
from scripted_lockstep.script.execution import EngineExecution, ScriptSucceeded
from scripted_lockstep.script.failures import error_of
from scripted_lockstep.script.run import EngineRun
from scripted_lockstep.tiers.server.fleet_servers import FleetServers
from scripted_lockstep.tiers.server.loop_thread import poll
from scripted_lockstep.tiers.server.parent import start_parent
from scripted_lockstep.tiers.server.role_world import RolePeer, RoleWorld
from scripted_lockstep.tiers.server.wire import EngineWanted
from scripted_lockstep.tiers.server.world import decoder_of
from scripted_lockstep.tiers.sim.runner import run_in_this_process

_NAMES: Final = {"decode": DECODE_ENGINE, "prefill": PREFILL_ENGINE}


class EngineRole(ScriptedServer[EngineConfig, ScriptSucceeded]):
    """One real engine with a role, and for a decode engine the prefill engine that computes its prompts."""

    def __init__(self, config: EngineConfig, *, mutant: str | None, parent: PreloadedParent | None) -> None:
        super().__init__(config, mutant=mutant)
        name = _NAMES[config.role]
        with ExitStack() as stack:
            parent = parent or stack.enter_context(start_parent())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scripted-")))
            self._peer = stack.enter_context(contextlib.closing(RolePeer(folder, _path_of(config))))
            urls = self._peer.urls_for(DECODE_ENGINE)[0] if config.role == "decode" else ""
            self._servers = stack.enter_context(contextlib.closing(FleetServers(config, mutant, parent)))
            (place,) = self._servers.start([EngineWanted(name=name, role=config.role, prefill_engines=urls)])
            if urls:
                others = stack.enter_context(contextlib.closing(FleetServers(config, None, parent, gate=None)))
                self._peer.prefill_url = others.start([EngineWanted(name=PREFILL_ENGINE, role="prefill")])[0].base_url
            context = stack.enter_context(zmq.Context())
            self._world = RoleWorld(place, context, self._pause, self._peer)
            stack.callback(self._world.close)
            self._world.new_decoder = lambda: decoder_of(ServerSettings(**config.model_dump()))
            self._world.await_ready()
            self._scheduler, self._clock = Scheduler(self._world.limits), VirtualClock()
            self._stack = stack.pop_all()

    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> ScriptSucceeded:
        usable, self.usable = self.usable, False
        assert usable, "a server that is not usable is not lent again"
        execution = EngineExecution(script, args, kwargs, options)
        succeeded = run_in_this_process(execution, self._run_loop, self.config, self.mutant)
        if not succeeded.spent:
            self._check_growth(script, options)
            self.usable = True
        return succeeded

    def _check_growth(self, script: ScriptFunction, options: ScriptOptions) -> None:
        try:
            self._servers.check_growth()
        except (Violation, psutil.Error) as exc:
            report = FailureReport(
                kind=FailureKind.FAILED,
                error=f"{type(exc).__name__}: {exc}",
                frames=definition_of(script.__code__),
                script=f"{file_of(script)}::{script.__qualname__}",
                tier="server",
                replay=options.replay,
            )
            raise error_of(report, self.config, self.mutant) from exc

    def _run_loop(self, source: OneScript) -> None:
        world, scheduler = self._world, self._scheduler
        world.start(scheduler)
        run = EngineRun(scheduler, world, source)
        # Until the reset, the scheduler is in the state in which the last script left it.
        run.clock = self._clock
        result: StepResult | None = None
        with run:
            while (step := run.next_step(result)) is not None:
                result = scheduler.step(step.events, step.now)
                world.carry_out(step, result)

    @property
    def is_alive(self) -> bool:
        """False once its supervisor is gone."""
        return not poll({self._world.alive: bool}, 0)

    def shutdown(self) -> None:
        self.usable = False
        self._stack.close()

    def _pause(self, timeout_s: float) -> bool:
        world, peer = self._world, self._peer
        return poll({peer.fileno(): peer.clear, **world.sources}, timeout_s)


def _path_of(config: EngineConfig) -> str:
    """Return the path with which an update restores an engine's initial weights."""
    seed = embedded_seed(config.model, config.seed)
    return config.model if seed is None else f"embedded:{seed}"
