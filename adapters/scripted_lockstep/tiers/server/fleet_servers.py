"""Starts, keeps and kills the servers of a script's fleets, in the test's process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine.core.config import EngineConfig
from engine.process.control import Serving
from engine.process.settings import LIVE_GATE, ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from scripted.core.violation import Violation
from scripted_lockstep.tiers.server.growth import ServerGrowth
from scripted_lockstep.tiers.server.parent import FOLLOWER_GATE, no_process_left
from scripted_lockstep.tiers.server.wire import EnginePlace, EngineWanted, GateOptions

_BOOT_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 30.0


class FleetServers:
    """Servers of ``config`` by the names of their engines, each in its own role.

    They are frozen, unless ``gate`` is None.
    """

    def __init__(
        self, config: EngineConfig, mutant: str | None, parent: PreloadedParent, *, gate: str | None = FOLLOWER_GATE
    ) -> None:
        self._config = config
        self._mutant = mutant
        self._gate = gate or LIVE_GATE
        self._parent = parent
        self._servers: dict[str, tuple[ServerProcess, Path]] = {}
        self._serving: dict[str, Serving] = {}
        self._growth: dict[str, ServerGrowth] = {}

    def start(self, wanted: Sequence[EngineWanted]) -> tuple[EnginePlace, ...]:
        """Start these servers in parallel. Raises StartupError with the cause if one fails to start."""
        for one in wanted:
            folder = Path(tempfile.mkdtemp(prefix="scripted-"))
            settings = ServerSettings(
                **self._config.model_dump() | {"role": one.role},
                prefill_engines=one.prefill_engines,
                # The script chooses the prefill engine; a choice by known loads would depend on time.
                prefill_retry_s=0,
                port=0,
                gate=self._gate,
                gate_options=msgspec.json.encode(GateOptions(mutant=self._mutant)).decode(),
                profile_dir=str(folder),
            )
            process = self._parent.serve(settings, folder, folder / "server.log", remove_private_dir=True)
            self._servers[one.name] = process, folder
        places = []
        for one in wanted:
            process, folder = self._servers[one.name]
            serving = process.wait_ready(_BOOT_TIMEOUT_S)
            self._serving[one.name] = serving
            places.append(EnginePlace(one.name, serving.base_url, str(folder), process.pid))
        return tuple(places)

    def check_growth(self) -> None:
        """Check all idle engines for growth after each script. Raises Violation.

        After its first script an engine is connected to the harness, but perhaps not yet to every other engine.
        """
        for name, serving in self._serving.items():
            if name not in self._growth:
                self._growth[name] = ServerGrowth(serving)
            try:
                self._growth[name].check(spare=len(self._serving))
            except Violation as exc:
                raise Violation(f"engine {name}: {exc}", inner=exc) from exc

    def kill(self, names: Sequence[str]) -> None:
        """Kill all processes of these engines and remove their files. Harmless for a dead one."""
        for name in names:
            if name not in self._servers:
                continue
            process, folder = self._servers.pop(name)
            self._growth.pop(name, None)
            with contextlib.closing(process):
                with no_process_left(process.pid):
                    # Killed first, so that it cannot send clients errors about the others' death: a lost machine cannot
                    # either.
                    with contextlib.suppress(KeyError, ProcessLookupError):
                        os.kill(self._serving.pop(name).pids["frontend"], signal.SIGKILL)
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    process.wait(_END_TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self.kill(list(self._servers))
