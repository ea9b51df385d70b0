"""Cost of waiting in the real scheduler process: CPU while a device computes elsewhere, added latency, idleness.

Scheduler (with its gate, sockets and staged pipeline) and device are separate processes. In place of the stages the
device sleeps 10 ms a step, so that a step takes real time and no CPU. Also measures an idle whole server.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil
import zmq

from benchmarks.measurement import Measurement, percentile
from benchmarks.processes import process_cpu_s
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import (
    Aside,
    Completion,
    Generate,
    GetStats,
    Reply,
    SamplingParams,
    StatsAnswer,
    TokenOutput,
    decode_replies,
    encode,
)
from engine.core.scheduler.ports import Step, StepResult
from engine.pipeline.channel import StageChannel, StageChannels
from engine.pipeline.wire import Launch, decode_stage_message, stage_address
from engine.process.control import Shutdown
from engine.process.private_dir import replies_address, requests_address
from engine.process.settings import ServerSettings
from engine.server.launch.child import fork_child
from engine.server.launch.preload import PreloadedParent
from engine.server.scheduler_process.gate_context import GateContext, SchedulerPlace
from engine.server.scheduler_process.live_gate import LiveGate
from engine.server.scheduler_process.main import run_scheduler

__all__ = ["TimedGate", "measure"]

STAGES: Final = 2
STEP_S: Final = 0.010
TOKEN: Final = 65
TOKENS: Final = 300
WARM_UP_TOKENS: Final = 16
WAKES: Final = 300
WAKE_GAP_S: Final = 0.005
IDLE_S: Final = 3.0
BARE_ROUNDS: Final = 200
BOUND_S: Final = 30
START_BOUND_S: Final = 120.0
QUIET_MS: Final = 50
MS: Final = 1e3

BUSY_CPU_TARGET_PERCENT: Final = 2.0
ADDED_TARGET_MS: Final = 0.1
WAKE_TARGET_MS: Final = 1.0
IDLE_CPU_TARGET_PERCENT: Final = 0.5


def measure() -> Iterator[Measurement]:
    """Measure CPU and latency beside a step of 10 ms, wake latency and idle CPU; the bare transport to compare."""
    with tempfile.TemporaryDirectory() as folder:
        private_dir = Path(folder)
        bare = _bare_round_trips(private_dir)
        bench = LiveLoopBench(private_dir)
        with _engine(private_dir) as scheduler:
            bench.busy(scheduler, WARM_UP_TOKENS)
            busy_cpu, added = bench.busy(scheduler, TOKENS)
            wakes = bench.wakes(WAKES)
            idle = {"scheduler of the above": _idle([scheduler])[scheduler.pid]}
        bench.close()
    idle |= {f"{name} of a whole server": looked for name, looked in _idle_server().items()}
    yield from _latencies(bare, added, wakes)
    yield Measurement(
        name="processes, scheduler's CPU meanwhile",
        value=busy_cpu * 100,
        unit="% of a core",
        target=BUSY_CPU_TARGET_PERCENT,
        spread="all threads of the process",
    )
    for name, (cpu, wakeups) in idle.items():
        yield Measurement(
            name=f"processes, idle CPU, {name}",
            value=cpu * 100,
            unit="% of a core",
            target=IDLE_CPU_TARGET_PERCENT,
            spread=f"{wakeups} wake-ups of all its threads in {IDLE_S:g} s",
        )


def _latencies(bare: Sequence[float], added: Sequence[float], wakes: Sequence[float]) -> Iterator[Measurement]:
    yield Measurement(
        name=f"processes, added to a step of {STEP_S * MS:.0f} ms elsewhere, p50",
        value=percentile(added, 50) * MS,
        unit="ms",
        target=ADDED_TARGET_MS,
        spread=f"from result sent to next plan taken, {len(added)} tokens, p99 {percentile(added, 99) * MS:.3f} ms",
    )
    yield Measurement(
        name="processes, the same way there and back with a mere echo, p50",
        value=percentile(bare, 50) * MS,
        unit="ms",
        spread=f"what of the above is transport on this machine; p99 {percentile(bare, 99) * MS:.3f} ms",
    )
    yield Measurement(
        name="processes, wake from idleness, p99",
        value=percentile(wakes, 99) * MS,
        unit="ms",
        target=WAKE_TARGET_MS,
        spread=f"{len(wakes)} messages, p50 {percentile(wakes, 50) * MS:.3f} ms",
    )


class TimedGate(LiveGate):
    """A live gate that reports to a socket when it woke for a call; all processes share the clock."""

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        self._zmq = zmq.Context()
        self._times = self._zmq.socket(zmq.PUSH)
        self._times.connect(context.settings.gate_options)

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Wait; after a wait for a call, report when it ended."""
        step = super().next_step(previous)
        if step is None:
            self._times.close(linger=0)
            self._zmq.term()
        elif any(isinstance(event, GetStats) for event in step.events):
            self._times.send(msgspec.msgpack.encode(step.now))
        return step


class DeviceStep(msgspec.Struct, frozen=True, array_like=True):
    """The times at which a plan reached the device and its result left, in seconds of the monotonic clock."""

    began: float
    ended: float


def run_device(private_dir: Path, times_address: str, parent_pid: int) -> None:
    """Play all stages: take each one's plans, sleep for a step, answer for the last."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channels = [StageChannel(stage_address(private_dir, stage)) for stage in range(STAGES)]
    times = context.socket(zmq.PUSH)
    times.connect(times_address)
    while os.getppid() == parent_pid:
        data = channels[-1].receive()
        began = time.monotonic()
        for channel in channels[:-1]:
            channel.receive()
        message = None if data is None else decode_stage_message(data)
        if not isinstance(message, Launch):
            return
        time.sleep(STEP_S)
        tokens = tuple(TOKEN for segment in message.microbatch.segments if segment.emits)
        answer = encode(Completion(microbatch_id=message.microbatch.id, token_ids=tokens))
        ended = time.monotonic()
        channels[-1].send(answer)
        times.send(msgspec.msgpack.encode(DeviceStep(began, ended)))


def run_echo(private_dir: Path) -> None:
    """Echo messages, to measure the transport alone."""
    channel = StageChannel(private_dir / "echo")
    while (frame := channel.receive()) is not None:
        channel.send(frame)


class LiveLoopBench:
    """A scheduler process, its device, and the front end's sockets, held by this process."""

    def __init__(self, private_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replies = _bound(self._context, replies_address(private_dir))
        self._device_times = _bound(self._context, f"ipc://{private_dir}/device-times")
        self._gate_times = _bound(self._context, f"ipc://{private_dir}/gate-times")
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.connect(requests_address(private_dir))
        self._sent = 0

    def busy(self, scheduler: psutil.Process, tokens: int) -> tuple[float, list[float]]:
        """Measure the CPU share during one stream of ``tokens`` tokens, and the seconds added to each token."""
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        cpu_before, started = process_cpu_s(scheduler), time.monotonic()
        self._requests.send(encode(Generate(rid=f"r{self._sent}", prompt_ids=(1, 2, 3), sampling=sampling)))
        self._sent += 1
        while not self._ended(self._reply()):
            continue
        cpu_s, seconds = process_cpu_s(scheduler) - cpu_before, time.monotonic() - started
        steps = [msgspec.msgpack.decode(_receive(self._device_times), type=DeviceStep) for _ in range(tokens)]
        added = [after.began - before.ended for before, after in itertools.pairwise(steps)]
        return cpu_s / seconds, added

    def wakes(self, count: int) -> list[float]:
        """Measure the seconds from a send to the step that takes it, each time from an idle state."""
        self._drain_gate_times()
        wakes = []
        for _ in range(count):
            time.sleep(WAKE_GAP_S)
            sent = time.monotonic()
            self._requests.send(encode(GetStats(call_id="wake")))
            wakes.append(float(msgspec.msgpack.decode(_receive(self._gate_times))) - sent)
            assert isinstance(self._reply()[-1], StatsAnswer)
        return wakes

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _reply(self) -> tuple[Reply | Aside, ...]:
        return decode_replies(_receive(self._replies))

    @staticmethod
    def _ended(replies: Sequence[Reply | Aside]) -> bool:
        return any(isinstance(reply, TokenOutput) and reply.finish_reason is not None for reply in replies)

    def _drain_gate_times(self) -> None:
        while self._gate_times.poll(QUIET_MS):
            self._gate_times.recv()


@contextmanager
def _engine(private_dir: Path) -> Iterator[psutil.Process]:
    """Run the scheduler process and its device, and end both."""
    own = os.getpid()
    settings = ServerSettings(
        pp_size=STAGES, gate=f"{TimedGate.__module__}:TimedGate", gate_options=f"ipc://{private_dir}/gate-times"
    )
    limits = Limits.of(settings, EMBEDDED_FACTS)
    place = SchedulerPlace(settings=settings, limits=limits, private_dir=private_dir, base_url="", stage_pids=())
    device = fork_child("device", lambda _: run_device(private_dir, f"ipc://{private_dir}/device-times", own))
    scheduler = fork_child("scheduler", lambda control: run_scheduler(control, place))
    try:
        while not scheduler.ready:
            scheduler.listen()
        yield psutil.Process(scheduler.pid)
    finally:
        scheduler.send(Shutdown())
        for child in (scheduler, device):
            while child.alive:
                child.listen()
            child.close()


def _bare_round_trips(private_dir: Path) -> list[float]:
    """Measure round trips between two waiting processes, each after a step's pause, as a token travels."""
    channels = StageChannels([private_dir / "echo"])
    echo = fork_child("echo", lambda _: run_echo(private_dir))
    trips = []
    for _ in range(BARE_ROUNDS):
        time.sleep(STEP_S)
        sent = time.monotonic()
        channels.send(0, b"x" * 100)
        while not channels.receive(BOUND_S):
            continue
        trips.append(time.monotonic() - sent)
    channels.close()
    while echo.alive:
        echo.listen()
    echo.close()
    return trips[1:]


def _idle_server() -> dict[str, tuple[float, int]]:
    """Measure the CPU share and wake-ups of each process of a whole server without requests."""
    with PreloadedParent.start() as parent, tempfile.TemporaryDirectory() as folder:
        process = parent.serve(ServerSettings(port=0), Path(folder), Path(folder) / "log")
        pids = process.wait_ready(START_BOUND_S).pids
        looked = _idle([psutil.Process(pid) for pid in pids.values()])
        process.kill()
        process.wait(BOUND_S)
        process.close()
    return {name: looked[pid] for name, pid in pids.items()}


def _idle(processes: Sequence[psutil.Process]) -> dict[int, tuple[float, int]]:
    """Measure the CPU share and the number of wake-ups of each process while idle."""
    before = {process.pid: (process_cpu_s(process), _wakeups(process)) for process in processes}
    time.sleep(IDLE_S)
    after = {process.pid: (process_cpu_s(process), _wakeups(process)) for process in processes}
    return {
        pid: ((cpu_s - before[pid][0]) / IDLE_S, wakeups - before[pid][1]) for pid, (cpu_s, wakeups) in after.items()
    }


def _wakeups(process: psutil.Process) -> int:
    """Return how often any thread stopped waiting."""
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    lines = [line for status in statuses for line in status.splitlines() if line.startswith("voluntary_ctxt")]
    return sum(int(line.split()[1]) for line in lines)


def _bound(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    return socket


def _receive(socket: zmq.Socket[bytes]) -> bytes:
    if not socket.poll(BOUND_S * 1000):
        raise SystemExit(f"nothing came within {BOUND_S} s; a process of the benchmark is stuck or dead")
    return socket.recv()
