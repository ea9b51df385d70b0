"""Cost of the gate in production: the live loop against the same loop written by hand, without a gate.

Both run the same scheduler over the same sockets in alternating blocks, so that other load slows both down. Time is the
CPU time of the thread, which never blocks here. The median difference of neighbouring blocks has a 95 % interval from
resampling the pairs.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from typing import Final

import zmq
from scripted_lockstep.simulated.pipeline import SimulatedPipeline

from benchmarks.measurement import Measurement, in_turn, median_interval
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import CacheEvent, ClientMessage, Event, Generate, Refusal, Reply, SamplingParams, encode
from engine.core.scheduler import Scheduler, StepResult, run_loop
from engine.core.scheduler.ports import Pipeline
from engine.process.clock import MonotonicClock
from engine.process.control import Control
from engine.process.inbox import MAX_MESSAGES_A_STEP, Inbox
from engine.process.settings import ServerSettings
from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.live_gate import LiveGate

__all__ = ["measure"]

# Short blocks: a disturbance of the machine outlasts one of them, and so hits both of a pair.
MODEL_PAIRS: Final = 100
MODEL_STEPS: Final = 12
SIMULATED_PAIRS: Final = 150
SIMULATED_STEPS: Final = 20
WARM_UP_STEPS: Final = 50
US: Final = 1e6
REQUESTS: Final = "inproc://requests"


def measure() -> Iterator[Measurement]:
    """Measure over a simulated pipeline, where the difference shows, and over the embedded model, where it matters."""
    with BareServer(ServerSettings()) as server:
        simulated = _pairs(server, SimulatedPipeline(server.limits), SIMULATED_PAIRS, SIMULATED_STEPS)
    with BareServer(ServerSettings()) as server:
        live = _pairs(server, _model(server), MODEL_PAIRS, MODEL_STEPS)
    yield Measurement(
        name="gate, difference that it makes to a step, simulated pipeline",
        value=_difference(simulated) * US,
        unit="us",
        spread=_spread(simulated),
    )
    yield Measurement(
        name="gate, difference that it makes to a live step, embedded model",
        value=_difference(live) * US,
        unit="us",
        spread=_spread(live),
    )


def _difference(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(hook - bare for hook, bare in pairs)


def _spread(pairs: Sequence[tuple[float, float]]) -> str:
    low, high = (bound * US for bound in median_interval([hook - bare for hook, bare in pairs]))
    return f"95 % interval {low:+.1f} to {high:+.1f} us of {_step(pairs) * US:,.0f} us, {len(pairs)} pairs"


class DiscardingOutbox:
    def send(self, replies: Sequence[Reply]) -> None:
        pass

    def publish(self, events: Sequence[CacheEvent]) -> None:
        pass


class BareServer(ExitStack):
    """A scheduler process without its server: real inbox, control pipe and gate, over any pipeline.

    Everything is in this process; nothing listens on a port.
    """

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.limits = Limits.of(settings, EMBEDDED_FACTS)
        self.scheduler = Scheduler(self.limits)
        self.zmq = self.enter_context(zmq.Context())
        self.inbox = Inbox(self.zmq, REQUESTS)
        self.callback(self.inbox.close)
        self._client = self.enter_context(self.zmq.socket(zmq.PUSH))
        self._client.connect(REQUESTS)
        supervisor, theirs = Pipe()
        self.callback(supervisor.close)
        self.callback(theirs.close)
        self.control = Control(theirs)

    def gate(self, pipeline: Pipeline) -> LiveGate:
        """Make a live gate over this server's sockets and that pipeline."""
        return LiveGate(
            GateContext(
                settings=self.settings,
                limits=self.limits,
                scheduler=self.scheduler,
                pipeline=pipeline,
                inbox=self.inbox,
                outbox=DiscardingOutbox(),
                control=self.control,
                clock=MonotonicClock(),
                base_url="",
                private_dir=Path(),
                stage_pids=(),
            )
        )

    def send(self, message: ClientMessage) -> None:
        """Send as the front end would, from one thread only."""
        self._client.send(encode(message))


class _BlockEnd(Exception):
    """Raised once a block has run its steps."""


class _Stopwatch(DiscardingOutbox):
    """An outbox that times a block of steps, each with a reply, and ends the block."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._sent = 0
        self._began = 0.0
        self.seconds_a_step = 0.0

    def send(self, replies: Sequence[Reply]) -> None:
        now = time.thread_time()
        if any(isinstance(reply, Refusal) for reply in replies):
            raise AssertionError(f"the request of the measurement was refused: {replies}")
        if not self._sent:
            self._began = now
        elif self._sent == self._steps:
            self.seconds_a_step = (now - self._began) / self._steps
            raise _BlockEnd
        self._sent += 1


def _pairs(server: BareServer, pipeline: Pipeline, count: int, steps: int) -> list[tuple[float, float]]:
    """Return the CPU seconds per step with and without the gate, in pairs of blocks in alternating order."""
    tokens = 2 * (WARM_UP_STEPS + 2) + count * 2 * (steps + 2)
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
    server.send(Generate(rid="decodes", prompt_ids=(65,) * 8, sampling=sampling))
    for block in (_with_gate, _without_gate):
        block(server, pipeline, WARM_UP_STEPS)
    pairs = []
    for number in range(count):
        took = {block: block(server, pipeline, steps) for block in in_turn((_with_gate, _without_gate), number)}
        pairs.append((took[_with_gate], took[_without_gate]))
    return pairs


def _with_gate(server: BareServer, pipeline: Pipeline, steps: int) -> float:
    """Run the engine's own loop."""
    return _timed(steps, lambda outbox: run_loop(server.gate(pipeline), server.scheduler, pipeline, outbox))


def _without_gate(server: BareServer, pipeline: Pipeline, steps: int) -> float:
    """Run the loop without a gate: one function, same waits, same events, same order."""
    return _timed(steps, lambda outbox: _inlined_loop(server, pipeline, outbox))


def _timed(steps: int, loop: Callable[[_Stopwatch], None]) -> float:
    stopwatch = _Stopwatch(steps)
    try:
        loop(stopwatch)
    except _BlockEnd:
        return stopwatch.seconds_a_step
    raise AssertionError("the loop ended before its block: the request was too short")


def _inlined_loop(server: BareServer, pipeline: Pipeline, outbox: _Stopwatch) -> None:
    inbox, control, scheduler, depth = server.inbox, server.control, server.scheduler, server.limits.depth
    poller = zmq.Poller()
    poller.register(inbox.socket, zmq.POLLIN)
    poller.register(control.fileno(), zmq.POLLIN)
    for source in pipeline.wake_sources():
        poller.register(source, zmq.POLLIN)
    result: StepResult | None = None
    while True:
        busy = result is not None and result.again
        deadline = result.deadline if result is not None else None
        if busy or pipeline.ready:
            timeout_ms: int | None = 0
        elif deadline is None:
            timeout_ms = None
        else:
            timeout_ms = math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
        if control.fileno() in dict(poller.poll(timeout_ms)):
            return
        events: list[Event] = []
        while len(events) < depth and (completion := pipeline.next_completion(0)) is not None:
            events.append(completion)
            if pipeline.ready:
                break
        events.extend(inbox.drain(MAX_MESSAGES_A_STEP))
        now = time.monotonic()
        if not events and not busy and (deadline is None or now < deadline):
            continue
        result = scheduler.step(tuple(events), now)
        if result.microbatch is not None:
            pipeline.launch(result.microbatch)
        if result.replies:
            outbox.send(result.replies)


def _model(server: BareServer) -> Pipeline:
    from engine.model.runner import StageRunner
    from engine.pipeline.local import LocalPipeline

    return LocalPipeline(StageRunner(server.settings, server.limits, 0))


def _step(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(itertools.chain.from_iterable(pairs))
