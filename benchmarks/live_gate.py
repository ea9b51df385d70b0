"""The live gate while it waits: how fast it wakes from idleness, and what it costs beside a step that takes real time.

The device is a thread that sleeps for as long as a step would compute, and answers on a socket, as a stage does. CPU is
that of the loop's own thread, and is told together with the latency that it buys.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import zmq

from benchmarks.bare_server import BareServer
from benchmarks.measurement import Measurement, percentile
from engine.messages import (
    Abort,
    Completion,
    Generate,
    GrammarReady,
    PipelineEvent,
    Reply,
    SamplingParams,
    TokenOutput,
    encode,
)
from engine.plan import GrammarOrder, Microbatch, TransferOrder
from engine.scheduler import run_loop
from engine.settings import ServerSettings

__all__ = ["measure"]

WAKES: Final = 300
IDLE_S: Final = 0.005
STEP_S: Final = 0.010
TOKENS: Final = 300
WAKE_TARGET_MS: Final = 1.0
ADDED_TARGET_MS: Final = 0.1
CPU_TARGET_PERCENT: Final = 2.0
RESULTS: Final = "inproc://results"
MS: Final = 1e3


def measure() -> Iterator[Measurement]:
    """Wake latency from idleness; then CPU and added latency beside a step of 10 ms."""
    latencies, useless = _idle_wakes()
    yield Measurement(
        name="live gate, wake from idleness, p99",
        value=percentile(latencies, 99) * MS,
        unit="ms",
        target=WAKE_TARGET_MS,
        spread=f"{WAKES} messages, p50 {percentile(latencies, 50) * MS:.3f} ms, {useless} wake-ups for nothing",
    )
    cpu_percent, added = _beside_a_device()
    yield Measurement(
        name=f"live gate, added to a step of {STEP_S * MS:.0f} ms elsewhere, p50",
        value=percentile(added, 50) * MS,
        unit="ms",
        target=ADDED_TARGET_MS,
        spread=f"from result sent to next launch, {len(added)} tokens, p99 {percentile(added, 99) * MS:.3f} ms",
    )
    yield Measurement(
        name="scheduler's CPU meanwhile",
        value=cpu_percent,
        unit="% of a core",
        target=CPU_TARGET_PERCENT,
        spread="the loop's thread, scheduling included",
    )


def _idle_wakes() -> tuple[list[float], int]:
    """Seconds from a message's sending to its step, and how often the gate woke for nothing."""
    with BareServer(ServerSettings(pp_size=2)) as server:
        client = threading.Thread(target=_send_now_and_then, args=(server,))
        latencies = []
        with server.gate(_NoPipeline()) as gate:
            client.start()
            while (step := gate.next_step(None)) is not None:
                now = time.perf_counter_ns()
                latencies += [(now - int(event.rid)) / 1e9 for event in step.events if isinstance(event, Abort)]
            # The last wake-up is the order to end.
            useless = gate.wakeups - WAKES - 1
        client.join()
    return latencies, useless


def _send_now_and_then(server: BareServer) -> None:
    for _ in range(WAKES):
        time.sleep(IDLE_S)
        server.send(Abort(rid=str(time.perf_counter_ns())))
    time.sleep(IDLE_S)
    server.shut_down()


def _beside_a_device() -> tuple[float, list[float]]:
    """The loop's CPU in percent of a core, and the seconds from each result to the next launch."""
    with BareServer(ServerSettings(pp_size=2)) as server:
        device = _Device(server.zmq)
        sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0, ignore_eos=True)
        server.send(Generate(rid="decodes", prompt_ids=(65,) * 8, sampling=sampling))
        began, cpu_began = time.perf_counter(), time.thread_time()
        run_loop(server.gate(device), server.scheduler, device, _UntilDone(server))
        cpu_s, wall_s = time.thread_time() - cpu_began, time.perf_counter() - began
        device.close()
    return 100 * cpu_s / wall_s, device.turnarounds


class _UntilDone:
    """An outbox that ends the loop with its only request."""

    def __init__(self, server: BareServer) -> None:
        self._server = server

    def send(self, replies: Sequence[Reply]) -> None:
        """Look for the end."""
        if any(isinstance(reply, TokenOutput) and reply.finish_reason is not None for reply in replies):
            self._server.shut_down()


class _WithoutOrders:
    """What a pipeline says where no request has a grammar and no engine a role, and of planning ahead."""

    takes_more = False

    def order_grammar(self, order: GrammarOrder) -> None:
        raise AssertionError(f"no request here has a grammar, got {order}")

    def order_transfer(self, order: TransferOrder) -> None:
        raise AssertionError(f"this engine has no role, got {order}")

    def answers(self) -> Sequence[GrammarReady]:
        return ()

    def answer_source(self) -> int | None:
        return None


class _NoPipeline(_WithoutOrders):
    """A pipeline that is never used."""

    ready = False

    def launch(self, microbatch: Microbatch) -> None:
        raise AssertionError(f"nothing is launched here, got {microbatch}")

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        del timeout_s
        return None

    def wake_sources(self) -> Sequence[Any]:
        return ()

    def close(self) -> None:
        pass


class _Device(_WithoutOrders):
    """A pipeline of a thread that takes STEP_S for each microbatch and says token 65 wherever one is due."""

    ready = False

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.turnarounds: list[float] = []
        self._sent_at: float | None = None
        self._work: queue.SimpleQueue[Microbatch | None] = queue.SimpleQueue()
        self._results = context.socket(zmq.PULL)
        self._results.bind(RESULTS)
        self._thread = threading.Thread(target=self._compute, args=(context,))
        self._thread.start()

    def launch(self, microbatch: Microbatch) -> None:
        """Hand a microbatch to the thread."""
        if self._sent_at is not None:
            self.turnarounds.append(time.perf_counter() - self._sent_at)
        self._work.put(microbatch)

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        """What the socket has."""
        del timeout_s
        try:
            return msgspec.msgpack.decode(self._results.recv(zmq.NOBLOCK), type=Completion)
        except zmq.Again:
            return None

    def wake_sources(self) -> Sequence[Any]:
        return (self._results,)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        self._results.close(linger=0)

    def _compute(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with context.socket(zmq.PUSH) as last_stage:
            last_stage.connect(RESULTS)
            while (microbatch := self._work.get()) is not None:
                time.sleep(STEP_S)
                tokens = tuple(65 for segment in microbatch.segments if segment.emits)
                frame = encode(Completion(microbatch_id=microbatch.id, token_ids=tokens))
                self._sent_at = time.perf_counter()
                last_stage.send(frame)
