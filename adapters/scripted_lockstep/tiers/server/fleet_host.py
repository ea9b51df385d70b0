"""Builds fleets of real engines for scripts, in the script's process.

It requests servers from the test's process and keeps them across scripts; a server that a script has damaged is
replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from engine.core.config import EngineConfig
from engine.core.scheduler import Scheduler
from scripted.core.clock import VirtualClock
from scripted.core.errors import BadCall
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.script.fleet import Fleet, FleetEngine, config_of
from scripted_lockstep.script.run import EngineRun
from scripted_lockstep.tiers.server.fleet_wires import MOST_PREFILLS, RealWires
from scripted_lockstep.tiers.server.remote import RemoteWorld
from scripted_lockstep.tiers.server.wire import EnginePlace, EnginesKilled, EnginesWanted, EngineWanted
from scripted_lockstep.tiers.server.world import ServerWorld

# Sends the test's process a command and returns the engines that it started.
AskForEngines = Callable[[EnginesWanted | EnginesKilled], Sequence[EnginePlace]]


class FleetHost:
    """Makes fleets of real engines of ``config``; ``world`` belongs to the script's own engine."""

    def __init__(self, config: EngineConfig, world: ServerWorld, ask: AskForEngines) -> None:
        self._config = config
        self._world = world
        self._ask = ask
        self._engines: dict[str, RemoteWorld] = {}
        # The engines of the current script, with their runs.
        self._used: list[FleetEngine] = []
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wires = RealWires(world.private_dir)

    def new_fleet(self, names: Sequence[str], clock: VirtualClock) -> Fleet:
        """Make a fleet of these engines. Raises BadCall, ConfigError, StartupError."""
        for name in names:
            config_of(name, self._config)
        prefills = [name for name in names if config_of(name, self._config).role == "prefill"]
        if len(prefills) > MOST_PREFILLS:
            raise BadCall(f"a fleet of the server tier has at most {MOST_PREFILLS} prefill engines, got {prefills}")
        self._drop([engine.name for engine in self._used if not _is_reusable(engine)])
        self._used = []
        self._start([name for name in names if name not in self._engines or self._engines[name].is_dead])
        worlds = {name: self._engines[name] for name in names}
        for world in worlds.values():
            world.begin(self._world.answer_timeout_s)
        self._wires.begin(worlds)

        def make(name: str) -> FleetEngine:
            if self._engines[name].is_dead:
                self._start([name])
                self._engines[name].begin(self._world.answer_timeout_s)
                self._wires.introduce(self._engines[name])
            world = self._engines[name]
            run = EngineRun(Scheduler(world.limits), world, None)
            run.join_fleet(clock)
            engine = FleetEngine(name, run, ScriptContext(run, rid_prefix=name))
            engine.wires = self._wires
            self._used = [one for one in self._used if one.name != name] + [engine]
            return engine

        return Fleet(names, make)

    def forget(self) -> None:
        """Drop all engines after a failed script: their state is unknown, and the test's process ends their servers."""
        for world in self._engines.values():
            world.close()
        self._engines.clear()
        self._used = []

    def close(self) -> None:
        for world in self._engines.values():
            world.close()
        self._wires.close()
        self._zmq.term()

    def _start(self, names: Sequence[str]) -> None:
        if not names:
            return
        wanted = []
        for name in names:
            role = config_of(name, self._config).role
            urls = self._wires.urls_for(name) if role == "decode" else []
            wanted.append(EngineWanted(name=name, role=role, prefill_engines=",".join(urls)))
        for place in self._ask(EnginesWanted(engines=tuple(wanted))):
            world = self._engines[place.name] = RemoteWorld(place, self._zmq, self._pause)
            world.on_kill = functools.partial(self._kill, place.name)
            world.on_sent = functools.partial(self._wires.take, place.name)
            world.new_decoder = self._world.decoder
            world.await_ready()

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            world = self._engines.pop(name)
            self._kill(name)
            world.close()

    def _kill(self, name: str) -> None:
        self._ask(EnginesKilled(names=(name,)))

    def _pause(self, timeout_s: float) -> bool:
        """Wait for an event of any engine or its clients. Returns whether there was one."""
        worlds = [world for world in self._engines.values() if world.alive >= 0]
        sources: dict[Any, Callable[[], None]] = {self._wires.fileno(): self._wires.clear}
        for world in worlds:
            sources |= world.sources
        return self._world.pause(timeout_s, sources)


def _is_reusable(engine: FleetEngine) -> bool:
    """Return whether the last script left an engine in a state that the next one can use."""
    run, scheduler = engine.run, engine.run.scheduler
    books = scheduler.books
    is_at_rest = scheduler.is_fully_idle and books.is_awake and books.paused is None and run.failure is None
    loras = scheduler.features.loras.resident
    is_changed = scheduler.counters.weights_version or loras or scheduler.memory.pages.cached
    return bool(is_at_rest and not is_changed)
