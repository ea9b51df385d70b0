"""The server tier in the test's process: starts a real server with the scripted gate and runs scripts on it.

Every wait also watches the server's lifeline, so a death is noticed at once and not after a timeout.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
import psutil
import zmq

from engine.core.config import EngineConfig
from engine.core.errors import EngineError, StartupError
from engine.core.frames import BadFrameError
from engine.core.limits import Limits
from engine.core.messages import encode
from engine.core.scheduler import StepRecord
from engine.process.control import Serving
from engine.process.death import describe_status, read_death_report
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.violation import Violation
from scripted.report.failure import FailureKind, FailureReport, ScriptError
from scripted.report.frames import Frame, definition_of
from scripted.script.harness import ScriptedServer
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.script.wire import HookReady, RunScript, ScriptFailedReply, Shutdown, command_to_run
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.script.failures import error_of
from scripted_lockstep.step_words import log_of
from scripted_lockstep.tiers.server.fleet_servers import FleetServers
from scripted_lockstep.tiers.server.forked_script import result_of_survivor
from scripted_lockstep.tiers.server.growth import ServerGrowth
from scripted_lockstep.tiers.server.loop_thread import poll
from scripted_lockstep.tiers.server.parent import SCRIPTED_GATE, no_process_left, start_parent
from scripted_lockstep.tiers.server.placed_stages import PlacedStages
from scripted_lockstep.tiers.server.ray_cluster import LocalCluster
from scripted_lockstep.tiers.server.stacks import dump_stacks
from scripted_lockstep.tiers.server.wire import (
    EnginesKilled,
    EnginesServed,
    EnginesWanted,
    GateOptions,
    Progress,
    connected_socket,
    decode_replies,
)

# The probe for the sizes of a stage, compared before the first script and after each.
STAGE_PROBE: Final = "scripted.core.sizes:sizes_of"
BOOT_TIMEOUT_S: Final = 120.0
# Each agent of a node forks from one preloaded parent.
RAY_BOOT_TIMEOUT_S: Final = 400.0
# The gate's own timeouts come first, with better errors; the test's process gives up this much later.
PATIENCE_S: Final = 5.0
# A server ends within 2 s of the death of one of its processes, on a busy machine later.
DEATH_TIMEOUT_S: Final = 20.0
SHUTDOWN_TIMEOUT_S: Final = 5.0
KEPT_STEPS: Final = 64
LOG_TAIL_BYTES: Final = 4096


class EngineServer(ScriptedServer[EngineConfig, ScriptSucceeded]):
    """One real server under the scripted gate. Make it with ``start``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        mutant: str | None,
        parent: PreloadedParent | None,
        placement: str = "local",
        cluster: LocalCluster | None = None,
    ) -> None:
        super().__init__(config, mutant=mutant)
        if config.pp_size == 1:
            placement = "local"  # A single stage has no process that could be placed.
        self.serving: Serving | None = None
        self._open = True
        self._interrupted = False
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._limits: Limits | None = None
        self._boot_timeout_s = RAY_BOOT_TIMEOUT_S if placement == "ray" else BOOT_TIMEOUT_S
        self._position: tuple[Frame, ...] = ()
        self._growth: ServerGrowth | None = None
        with ExitStack() as stack:
            parent = parent or stack.enter_context(start_parent())
            self._folder = Path(tempfile.mkdtemp(prefix="scripted-"))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._log = self._folder / "server.log"
            if placement == "ray" and cluster is None:
                cluster = stack.enter_context(contextlib.closing(LocalCluster(config.pp_size)))
            self._placed = stack.enter_context(self._stages(placement, cluster if placement == "ray" else None))
            context = stack.enter_context(zmq.Context())
            self._socket = stack.enter_context(connected_socket(context, self._folder))
            self._process = stack.enter_context(
                contextlib.closing(parent.serve(self._settings(), self._folder, self._log, remove_private_dir=True))
            )
            self._parent = parent
            self._fleet = stack.enter_context(contextlib.closing(FleetServers(config, mutant, parent)))
            self._stack = stack.pop_all()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._process.fileno(), zmq.POLLIN)

    @contextlib.contextmanager
    def _stages(self, placement: str, cluster: LocalCluster | None) -> Iterator[PlacedStages | None]:
        """Place the stages that are not local; None if all are."""
        if placement == "local":
            yield None
            return
        with contextlib.closing(PlacedStages(self._folder, self.config.pp_size, cluster)) as placed:
            yield placed

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        mutant: str | None = None,
        adapter: str | None = None,
        placement: str = "local",
        parent: PreloadedParent | None = None,
        cluster: LocalCluster | None = None,
    ) -> EngineServer:
        """Start a server, warmed up and frozen before its first script; a context manager.

        It is forked from the preloaded ``parent``; without one it starts its own, which takes seconds. ``placement``
        says where its stages are, with 'ray' on ``cluster`` or on a cluster of its own. Raises StartupError with the
        cause if the server fails to start. Raises ScriptDefinitionError for an engine with a role.
        """
        del adapter  # The subclass is for roles.
        if config.role != "both":
            raise ScriptDefinitionError(
                f"EngineServer has engines of role='both', got role={config.role!r}; decorate the script with "
                "@scripted and run it with pytest, or with run_script()"
            )
        server = cls(config, mutant=mutant, parent=parent, placement=placement, cluster=cluster)
        try:
            server._await_hook()
        except BaseException:
            server.usable = False
            server.shutdown()
            raise
        return server

    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> ScriptSucceeded:
        if not self.usable:
            raise EngineError("this server is shut down or no longer usable; start another one")
        if "<locals>" in script.__qualname__ or script.__name__ == "<lambda>":
            raise ScriptDefinitionError(
                f"{script.__qualname__} must be defined at the top of its file or in a class there, to be found "
                "by its name"
            )
        command = command_to_run(script, args, kwargs, options)
        self._steps.clear()
        # Until its process reports its position.
        self._position = definition_of(script.__code__)
        try:
            self._socket.send(encode(command))
            return self._await_result(command)
        except BadFrameError as exc:
            self.usable = False
            error = f"the gate sent a frame that is not a reply, a defect of the harness: {exc}"
            raise self._error(self._bare(command, FailureKind.FAILED, error)) from exc
        except (KeyboardInterrupt, SystemExit):
            # The script still runs there, so the server would not read an order to end.
            self.usable, self._interrupted = False, True
            raise

    @property
    def base_url(self) -> str:
        """The server's own URL, on loopback."""
        assert self.serving is not None
        return self.serving.base_url

    def shutdown(self) -> None:
        if self._open:
            self._open = False
            with no_process_left(self._process.pid):
                self._end(self._process)
            self.usable = False
            self._stack.close()

    # -- starting --

    def _settings(self) -> ServerSettings:
        relay = str(self._placed.orders_path) if self._placed is not None else None
        options = msgspec.json.encode(GateOptions(mutant=self.mutant, relay=relay)).decode()
        placed = self._placed.settings if self._placed is not None else {}
        return ServerSettings(
            **self.config.model_dump(),
            **placed,
            port=0,
            gate=SCRIPTED_GATE,
            gate_options=options,
            stage_probe=STAGE_PROBE,
            profile_dir=str(self._folder),
        )

    # -- waiting --

    def _await_hook(self) -> None:
        if self._placed is not None:
            self._placed.start(self._parent, self._process)
        self.serving = self._process.wait_ready(self._boot_timeout_s)
        reply = self._next_reply(time.monotonic() + BOOT_TIMEOUT_S)
        if not isinstance(reply, HookReady):
            report = read_death_report(self._folder)
            cause = report.cause if report is not None else self._log_tail()
            raise StartupError(f"the server failed before its first script: {cause}")
        self._growth = ServerGrowth(self.serving)

    def _await_result(self, command: RunScript) -> ScriptSucceeded:
        reply = self._next_reply(time.monotonic() + command.options.timeout_s + PATIENCE_S)
        if reply is None:
            survived = result_of_survivor(self._folder, command.options.timeout_s)
            if isinstance(survived, ScriptSucceeded):
                self.usable = False
                sys.stdout.write(survived.printed)
                return survived
            reply = survived
        if isinstance(reply, ScriptSucceeded):
            sys.stdout.write(reply.printed)
        if isinstance(reply, ScriptSucceeded) and self.is_alive:
            self.usable = not reply.spent
            if self.usable:
                self._check_growth(command)
            return reply
        if isinstance(reply, ScriptSucceeded):
            raise self._error(self._died(command))
        if isinstance(reply, ScriptFailedReply):
            sys.stdout.write(reply.report.printed)
            raise self._error(self._with_growth(reply.report))
        raise self._error(self._overdue(command) if reply is None and self.is_alive else self._died(command))

    def _check_growth(self, command: RunScript) -> None:
        """Check for growth. A server that has grown is not used again: the next script would be blamed."""
        assert self._growth is not None
        try:
            self._growth.check()
            self._fleet.check_growth()
        except (Violation, psutil.Error) as exc:
            self.usable = False
            if not self.is_alive:
                raise self._error(self._died(command)) from exc
            raise self._error(self._bare(command, FailureKind.FAILED, f"{type(exc).__name__}: {exc}")) from exc

    def _with_growth(self, report: FailureReport) -> FailureReport:
        """Add a failed script's leftovers to its report, so that the next script is not blamed for them."""
        assert self._growth is not None
        if report.spent or report.kind is not FailureKind.FAILED:
            return report
        try:
            self._growth.check_scheduler()
        except (Violation, psutil.Error) as exc:
            error = f"{report.error}\n{exc}; the server is replaced"
            return msgspec.structs.replace(report, error=error, spent=True)
        return report

    def _next_reply(self, deadline: float) -> HookReady | ScriptSucceeded | ScriptFailedReply | None:
        """Return the gate's next message; None when the server ended without one, or when the time is up.

        Raises BadFrameError at once for an undecodable frame: its content is lost.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            readable = dict(self._poller.poll(int(left_s * 1000) + 1))
            if self._socket in readable:
                reply = decode_replies(self._socket.recv())
                if isinstance(reply, Progress):
                    self._follow(reply)
                elif isinstance(reply, EnginesWanted | EnginesKilled):
                    asked_at = time.monotonic()
                    self._socket.send(encode(self._served(reply)))
                    deadline += time.monotonic() - asked_at
                else:
                    return reply
            elif self._process.fileno() in readable:
                return None
        return None

    def _served(self, asked: EnginesWanted | EnginesKilled) -> EnginesServed:
        """Start or kill engines of a fleet for the script."""
        if isinstance(asked, EnginesKilled):
            self._fleet.kill(asked.names)
            return EnginesServed()
        assert self._growth is not None
        # Connections to the fleet's engines and between them.
        self._growth.leave_out("scheduler")
        try:
            return EnginesServed(places=self._fleet.start(asked.engines))
        except (StartupError, TimeoutError) as exc:
            self._fleet.close()
            return EnginesServed(error=str(exc))

    def _follow(self, progress: Progress) -> None:
        if progress.record is not None:
            self._steps.append(progress.record)
        self._limits, self._position = progress.limits, progress.position
        sys.stdout.write(progress.printed)

    @property
    def is_alive(self) -> bool:
        """False once the server's supervisor is gone."""
        return not poll({self._process.fileno(): bool}, 0)

    # -- reports --

    def _error(self, report: FailureReport) -> ScriptError:
        """Make the error of a report, with the details that this process knows. Only a failed script leaves a usable
        server, unless the engine has grown.
        """
        self.has_failed = True
        # The gate has dropped them as well.
        self._fleet.close()
        if report.spent or report.kind is not FailureKind.FAILED:
            self.usable = False
        if report.kind is FailureKind.DIED:
            report = self._with_death(report)
        if report.kind is FailureKind.TIMEOUT:
            pids = self.serving.pids if self.serving is not None else {}
            report = msgspec.structs.replace(report, stacks=dump_stacks(pids, self._log))
        return error_of(report, self.config, self.mutant)

    def _with_death(self, report: FailureReport) -> FailureReport:
        """Wait for the end of the server; the supervisor's report says which process died first, and why."""
        status = 0
        with contextlib.suppress(TimeoutError):
            status = self._process.wait(DEATH_TIMEOUT_S)
        death = read_death_report(self._folder)
        if death is None and status < 0:
            # A killed supervisor writes no report; its processes end with it.
            return msgspec.structs.replace(report, dead_process="supervisor", cause=describe_status(status))
        if death is None:
            return report if report.cause else msgspec.structs.replace(report, cause=self._log_tail())
        return msgspec.structs.replace(report, dead_process=death.process, cause=death.cause)

    def _died(self, command: RunScript) -> FailureReport:
        return self._bare(command, FailureKind.DIED, "the server died under the script")

    def _overdue(self, command: RunScript) -> FailureReport:
        return self._bare(
            command, FailureKind.TIMEOUT, f"the script did not end within timeout_s={command.options.timeout_s}"
        )

    def _bare(self, command: RunScript, kind: FailureKind, error: str) -> FailureReport:
        """Make the report of a script whose process could not send one."""
        return FailureReport(
            kind=kind,
            error=error,
            frames=self._position,
            script=f"{command.file}::{command.name}",
            tier="server",
            log=None if self._limits is None else log_of(self._steps, self._limits),
            replay=command.options.replay,
        )

    def _log_tail(self) -> str:
        try:
            return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
        except FileNotFoundError:
            return "it left no log"

    def _end(self, process: ServerProcess) -> None:
        """Shut the server down in order if possible, else by force."""
        if self._interrupted:
            process.kill()
        elif self.usable:
            self._socket.send(encode(Shutdown()))
        else:
            process.terminate()
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            with contextlib.suppress(TimeoutError):
                process.wait(SHUTDOWN_TIMEOUT_S)
