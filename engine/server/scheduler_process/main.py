"""The scheduler process: connects scheduler, pipeline, sockets and gate, and runs the loop.

Imports no torch when the stages are separate processes. An exception in a step ends this process on purpose, and the
supervisor gets its traceback as the cause: a scheduler whose books do not balance would serve wrong tokens.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from engine.core.errors import ConfigError
from engine.core.instruments import SilentDigests
from engine.core.messages import Aside, CacheEvent, Reply, TransferEvent, encode
from engine.core.recording import FlightRecorder, Header, RecordingFile, RecordingGate, Redactor, Sink
from engine.core.scheduler.loop import run_loop
from engine.core.scheduler.ports import Gate, Pipeline
from engine.core.scheduler.scheduler import Scheduler
from engine.process.clock import MonotonicClock
from engine.process.control import Control, Ready
from engine.process.inbox import UNBOUNDED, Inbox
from engine.process.private_dir import RECONNECT_INTERVAL_MS, replies_address, requests_address
from engine.process.settings import LIVE_GATE, ServerSettings
from engine.server.scheduler_process.gate_context import GateContext, SchedulerPlace, load_gate
from engine.server.scheduler_process.traced_gate import StageTimes, TracedGate
from lockstep.output_files import told_of


def recorded(gate: Gate, scheduler: Scheduler, settings: ServerSettings) -> Gate:
    """Wrap the gate in the recorders that the settings enable. Raises ConfigError for a path that cannot be written.

    The flight record is dumped when the loop dies, and whenever the process gets SIGUSR2.
    """
    sinks: list[Sink] = []
    header = Header(limits=scheduler.limits, redacted=settings.record_redacted)
    try:
        if settings.record:
            sinks.append(RecordingFile(settings.record))
        if settings.flight_dir:
            path = flight_path(settings.flight_dir, os.getpid())
            path.parent.mkdir(parents=True, exist_ok=True)
            flight = FlightRecorder(header, path)
            signal.signal(signal.SIGUSR2, lambda *_: flight.leave())
            sinks.append(flight)
    except OSError as exc:
        raise ConfigError(f"record and flight_dir must be writable paths, got {told_of(exc)}; choose another") from exc
    redactor = Redactor() if settings.record_redacted else None
    return RecordingGate(gate, scheduler, sinks, redactor=redactor) if sinks else gate


def flight_path(folder: str, pid: int) -> Path:
    """Return the path of the flight record of the scheduler process ``pid``."""
    return Path(folder) / f"flight-{pid}.rec"


class ReplySocket:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, UNBOUNDED)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._socket.connect(address)

    def send(self, replies: Sequence[Reply | Aside]) -> None:
        self._socket.send(encode(tuple(replies)), zmq.NOBLOCK)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        self.send(events)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket, waiting up to ``linger_s`` seconds until the last replies are sent."""
        self._socket.close(linger=int(linger_s * 1000))


# The time for the last step's replies, such as errors for all live requests, to be sent before the process exits.
LAST_REPLIES_LINGER_S = 0.2


def run_scheduler(control: Control, place: SchedulerPlace) -> None:
    """Run the loop until its gate ends it. Propagates the exceptions of a step."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Inbox(context, requests_address(place.private_dir))
    outbox = ReplySocket(context, replies_address(place.private_dir))
    pipeline, stuck_stage, stage_times = _build_pipeline(place, control)
    scheduler = Scheduler(place.limits)
    inner = load_gate(
        GateContext(
            **vars(place),
            scheduler=scheduler,
            pipeline=pipeline,
            inbox=inbox,
            outbox=outbox,
            control=control,
            clock=MonotonicClock(),
            stuck_stage=stuck_stage,
        )
    )
    gate = recorded(inner, scheduler, place.settings)
    if gate is inner and place.settings.gate == LIVE_GATE:
        scheduler.digests = SilentDigests()  # only recordings and harnesses read them
    if place.settings.otlp_traces_endpoint:
        gate = TracedGate(gate, outbox.send, stage_times)
    control.send(Ready())
    try:
        run_loop(gate, scheduler, pipeline, outbox)
    except BaseException as exc:
        # Before the stages lose their connections: the last replies may take longer than others wait for a cause.
        control.report_death(exc)
        raise
    finally:
        inbox.close()
        outbox.close(LAST_REPLIES_LINGER_S)
        pipeline.close()
        context.term()


def _build_pipeline(
    place: SchedulerPlace, control: Control
) -> tuple[Pipeline, Callable[[int], tuple[str, str]] | None, StageTimes | None]:
    """Build the pipeline; if stages are processes, also the functions that return a stuck stage and the stages' times.

    Loads torch only when the model runs in this process.
    """
    if place.limits.pp_size > 1:
        from engine.pipeline.staged import StagedPipeline

        if place.handed is None:
            staged = StagedPipeline(place.private_dir, place.limits.pp_size, place.stage_pids)
        else:
            source = socket.socket(fileno=place.handed)
            staged = StagedPipeline(place.private_dir, place.limits.pp_size, handed=source)
        return staged, staged.stuck, staged.stage_times
    from engine.model.runner import StageRunner
    from engine.pipeline.kv_port import KVLinks, KVPort, open_kv_port
    from engine.pipeline.local import LocalPipeline

    runner = StageRunner(place.settings, place.limits, 0, on_load=control.send)

    def kv_port(answer: Callable[[TransferEvent], None]) -> KVPort | None:
        return open_kv_port(place.settings, runner.page_images, answer, place.private_dir, KVLinks.of(place.settings))

    return LocalPipeline(runner, probe=place.settings.stage_probe, kv_port=kv_port), None, None
