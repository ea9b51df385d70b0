"""The scripted gate of a real server, which the scheduler process loads if its settings name it.

Listens on a private socket for scripts, runs them in the gate, and reports their ends, even if a script kills the
scheduler.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from engine.core.config import EngineConfig
from engine.core.errors import ProcessDiedError, StartupError
from engine.core.frames import BadFrameError
from engine.core.messages import encode
from engine.process.control import ProcessDied
from engine.process.control import Shutdown as SupervisorShutdown
from engine.server.scheduler_process.gate_context import GateContext
from lockstep.process_control import adopt_orphans
from scripted.core.clock import VirtualClock
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.frames import frames_of, position_of
from scripted.report.tally import REPLACED
from scripted.script.arguments import unpacked
from scripted.script.execution import ScriptSource, kind_of
from scripted.script.loader import load_script
from scripted.script.process_state import ProcessState
from scripted.script.wire import HookReady, RunScript, ScriptFailedReply, Shutdown
from scripted_lockstep.script.execution import EngineExecution, ScriptSucceeded, configs_of
from scripted_lockstep.script.fleet import Fleet
from scripted_lockstep.script.run import EngineRun
from scripted_lockstep.tiers.server.fleet_host import FleetHost
from scripted_lockstep.tiers.server.forked_script import leave_result
from scripted_lockstep.tiers.server.wire import (
    EnginePlace,
    EnginesKilled,
    EnginesServed,
    EnginesWanted,
    GateSocket,
    Progress,
    decode_command,
)
from scripted_lockstep.tiers.server.world import ServerWorld, ShutdownAsked

_Said = HookReady | Progress | ScriptSucceeded | ScriptFailedReply | EnginesWanted | EnginesKilled
# Changes that the summary of a session names.
_MOST_NAMED: Final = 3
# The final message of a dying scheduler must leave its process.
FINAL_MESSAGE_LINGER_MS: Final = 1000


def scripted_gate(context: GateContext) -> EngineRun:
    """Make the gate of a scripted server, whose settings name this function."""
    gate = GateSocket(context, linger_ms=FINAL_MESSAGE_LINGER_MS)
    relay = gate.options.relay
    world = ServerWorld(context, Path(relay) if relay is not None else None)
    source = WireSource(context, world, gate)
    run = EngineRun(context.scheduler, world, source)
    run.new_fleet = source.new_fleet
    return run


class WireSource(ScriptSource):
    """Takes scripts from the private socket, and sends their results back."""

    warms_up = True

    def __init__(self, context: GateContext, world: ServerWorld, gate: GateSocket) -> None:
        self._control = context.control
        self._private_dir = context.private_dir
        self._world = world
        self._mutant = gate.options.mutant
        self._gate = gate
        self._socket = gate.socket
        self._poller = zmq.Poller()
        self._reported = 0
        self._supervisor = os.getppid()
        self._pid = os.getpid()
        # The state that the running script must leave unchanged for later scripts.
        self._state: ProcessState | None = None
        values = context.settings.model_dump()
        self._config = EngineConfig(**{name: values[name] for name in EngineConfig.model_fields})
        self._host: FleetHost | None = None

    def open(self) -> None:
        """Wait for the server to be open, switch the mutant on, and listen.

        This process adopts the orphans that a script leaves. A forked copy closes the control socket, so that the
        supervisor still notices this process's death.
        """
        adopt_orphans()
        os.register_at_fork(after_in_child=self._control.close)
        self._gate.open()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._control.fileno(), zmq.POLLIN)

    def next_script(self) -> EngineExecution | None:
        """Wait for a script. Between two scripts the loop waits here."""
        while True:
            readable = dict(self._poller.poll())
            if self._control.fileno() in readable:
                if isinstance(self._control.receive(), SupervisorShutdown):
                    return None
                continue
            try:
                command = decode_command(self._socket.recv())
            except BadFrameError as exc:
                error = f"the gate received a frame that is not a command, a defect of the harness: {exc}"
                self._send(ScriptFailedReply(report=FailureReport(kind=FailureKind.FAILED, error=error, spent=True)))
                continue
            if isinstance(command, EnginesServed):
                continue  # The answer to a script that ended while it waited for its engines.
            if isinstance(command, Shutdown):
                # SIGINT ends the server at once; SIGTERM would let live requests finish.
                os.kill(os.getppid(), signal.SIGINT)
                continue
            script = self._load(command)
            if script is not None:
                self._reported = 0
                self._state = ProcessState(configs_of(script.function)) if script.options.must_assert else None
                return script

    def progress(self, run: EngineRun, script: EngineExecution | None) -> None:
        """Report each step to the test process, so that it can show the steps before a death without a message."""
        if script is None or not run.recording:
            return
        records = run.records
        new, self._reported = records[-1] if len(records) > self._reported else None, len(records)
        position, printed = position_of(script.script), script.take_printed()
        self._send(Progress(record=new, limits=run.scheduler.limits, printed=printed, position=position))

    def ended(self, run: EngineRun, script: EngineExecution | None) -> None:
        """Report that a run passed, or that the server is warm. A script that killed the supervisor has not passed."""
        del run
        if os.getppid() != self._supervisor and os.getpid() == self._pid:
            return  # No message: the test process sees the end of the server and finds the cause.
        if script is None:
            self._send(HookReady())
            return
        passed = script.succeeded()
        if changes := self._changes():
            loose_ends = passed.loose_ends | {f"{REPLACED}{', '.join(changes[:_MOST_NAMED])}": 1}
            passed = msgspec.structs.replace(passed, spent=True, loose_ends=loose_ends)
        self._send(passed)

    def failed(self, run: EngineRun, script: EngineExecution | None, exc: Exception) -> None:
        """Report how a run failed. The supervisor handles a failed warm-up and an order to end."""
        if script is None or isinstance(exc, ShutdownAsked):
            raise exc
        if self._host is not None:
            self._host.forget()
        report = script.report(run, exc, kind_of(exc), self._mutant)
        self._send(
            ScriptFailedReply(report=msgspec.structs.replace(report, spent=report.spent or bool(self._changes())))
        )

    def _changes(self) -> list[str]:
        """List the script's changes to this process, which then runs no other script.

        The copy of a process that a script has killed ends with this script.
        """
        state, self._state = self._state, None
        return [] if state is None or os.getpid() != self._pid else state.changes()

    def crashed(self, run: EngineRun, script: EngineExecution | None, exc: BaseException) -> None:
        if script is not None and not isinstance(exc, ShutdownAsked):
            report = script.report(run, exc, FailureKind.DIED, self._mutant)
            self._send(ScriptFailedReply(report=report))

    def new_fleet(self, names: Sequence[str], clock: VirtualClock) -> Fleet:
        """Start real engines of these names. Raises BadCall, ConfigError, StartupError."""
        if self._host is None:
            self._host = FleetHost(self._config, self._world, self._ask_for)
        return self._host.new_fleet(names, clock)

    def _ask_for(self, asked: EnginesWanted | EnginesKilled) -> Sequence[EnginePlace]:
        self._send(asked)
        while self._socket not in dict(self._poller.poll()):
            if isinstance(self._control.receive(), SupervisorShutdown | ProcessDied):
                raise ProcessDiedError("supervisor", "it ended the server while a script waited for a fleet")
        served = decode_command(self._socket.recv())
        assert isinstance(served, EnginesServed), served
        if served.error:
            raise StartupError(f"an engine of the fleet failed to start: {served.error}")
        return served.places

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._world.close()
        self._gate.close()

    def _load(self, command: RunScript) -> EngineExecution | None:
        """Load the script of a command; None, and a report of failure, if that fails."""
        try:
            function = load_script(command.file, command.name, command.import_paths)
        except Exception as exc:  # noqa: BLE001 - whatever importing a test file raises is the script's result
            self._send(ScriptFailedReply(report=_load_report(command, exc)))
            return None
        args, kwargs = tuple(unpacked(command.args)), unpacked(command.kwargs)
        return EngineExecution(function, args, kwargs, command.options, keeps_output=True)

    def _send(self, message: _Said) -> None:
        """Send a message to the test process; the copy of a killed process ends with it."""
        if os.getpid() != self._pid:
            assert isinstance(message, ScriptSucceeded | ScriptFailedReply), f"a copy runs no step, got {message}"
            leave_result(self._private_dir, message)
        self._socket.send(encode(message))


def _load_report(command: RunScript, exc: Exception) -> FailureReport:
    kind = FailureKind.FAILED
    what = str(exc) if isinstance(exc, ScriptDefinitionError) else f"{type(exc).__name__}: {exc}"
    return FailureReport(
        kind=kind,
        error=f"the script could not be loaded in the scheduler process: {what}",
        frames=frames_of(exc, inside=command.file),
        script=f"{command.file}::{command.name}",
        tier=ServerWorld.tier,
        replay=command.options.replay,
    )
