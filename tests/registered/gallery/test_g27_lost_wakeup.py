"""G27: a message between "the queue is empty" and "wait".

Goal: the live gate wakes for a message that comes after its last look and before its wait, and for one that a bounded
look did not take. Method: the production gate over real sockets; messages are sent inside the window, which a hook on
the wait holds open. Origin: roseinfer; A01, A03, A04. Mutant: in this file, a gate that waits on ZeroMQ's
edge-triggered file descriptor instead of its socket and loses the second kind.
"""

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import zmq

from ci.register import register_cpu_ci
from engine.core.messages import Abort, encode
from engine.core.scheduler.ports import StepResult
from engine.process.clock import MonotonicClock
from engine.process.control import Control
from engine.process.inbox import MAX_MESSAGES_A_STEP, Inbox
from engine.process.settings import ServerSettings
from engine.server.scheduler_process.live_gate import LiveGate

register_cpu_ci(est_time=2, suite="base-cpu")

ADDRESS = "inproc://lost-wakeup"
ROUNDS = 200
WAIT_LIMIT_MS = 2000
NOTHING = StepResult(step=1, microbatch=None, replies=(), again=False, deadline=None)
IDLE_PIPELINE = SimpleNamespace(
    ready=False,
    next_completion=lambda timeout_s: None,
    wake_sources=lambda: (),
    answers=lambda: (),
    answer_source=lambda: None,
)


class LostWakeUp(Exception):
    """The gate would have slept although a message had arrived."""


class WindowGate(LiveGate):
    """The production gate; ``in_the_window`` is called after its last look and before each wait."""

    in_the_window = staticmethod(lambda: None)
    limit_ms = WAIT_LIMIT_MS

    def _wait(self, deadline, work_is_there):
        self.in_the_window()
        # The gate's wait with a bound in place of its endless one, so that a lost wake-up does not hang the test.
        if not self._poller.poll(self.limit_ms):
            raise LostWakeUp
        super()._wait(deadline, work_is_there)


class EdgeTriggeredGate(WindowGate):
    """The bug: it waits on the descriptor, which signals a message once."""

    limit_ms = 0

    def __enter__(self):
        self._poller.register(self._inbox.socket.getsockopt(zmq.FD), zmq.POLLIN)
        return self


@pytest.fixture
def ends():
    with zmq.Context() as context:
        inbox = Inbox(context, ADDRESS)
        client = context.socket(zmq.PUSH)
        client.setsockopt(zmq.SNDHWM, 0)
        client.connect(ADDRESS)
        supervisor, theirs = Pipe()
        control = Control(theirs)
        yield inbox, client, control
        client.close(linger=0)
        inbox.close()
        control.close()
        supervisor.close()


def _gate(kind, ends):
    inbox, _, control = ends
    limits = SimpleNamespace(depth=1)
    context = SimpleNamespace(
        inbox=inbox,
        pipeline=IDLE_PIPELINE,
        control=control,
        clock=MonotonicClock(),
        limits=limits,
        scheduler=SimpleNamespace(is_fully_idle=False),
        settings=ServerSettings(),
        stuck_stage=None,
    )
    return kind(context)


def _send(client, count):
    for number in range(count):
        client.send(encode(Abort(rid=f"r{number}")))


def test_a_message_between_the_look_and_the_wait(ends):
    _, client, _ = ends
    with _gate(WindowGate, ends) as gate:
        gate.in_the_window = lambda: _send(client, 1)
        for _ in range(ROUNDS):
            step = gate.next_step(NOTHING)
            assert [event.rid for event in step.events] == ["r0"]


def test_a_message_that_a_bounded_look_left_behind(ends):
    _, client, _ = ends
    with _gate(WindowGate, ends) as gate:
        _send(client, MAX_MESSAGES_A_STEP + 1)
        assert len(gate.next_step(NOTHING).events) == MAX_MESSAGES_A_STEP
        assert len(gate.next_step(NOTHING).events) == 1


def test_an_edge_triggered_wait_loses_it(ends):
    _, client, _ = ends
    with _gate(EdgeTriggeredGate, ends) as gate:
        _send(client, MAX_MESSAGES_A_STEP + 1)
        assert len(gate.next_step(NOTHING).events) == MAX_MESSAGES_A_STEP
        with pytest.raises(LostWakeUp):
            gate.next_step(NOTHING)
