"""The production gate: runs a step only for a message, a completion or a deadline.

Blocks in one poll over the inbox, the pipeline and the control pipe; never spins and never sleeps. Turns client
messages into events.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final, Self

import zmq

from engine.core.audit import audit
from engine.core.errors import ProcessDiedError
from engine.core.messages import Event, PipelineEvent, PipelineFailed
from engine.core.plan import Microbatch
from engine.core.scheduler.deadlines import earliest
from engine.core.scheduler.ports import Step, StepResult
from engine.core.scheduler.scheduler import Scheduler
from engine.process.clock import Clock
from engine.process.control import STAGE_PREFIX, Dying, ProcessDied, Serving, Shutdown
from engine.process.inbox import MAX_MESSAGES_A_STEP
from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.step_watch import StepWatch

# Bounds one poll: the kernel's timeout in milliseconds is a 32-bit integer.
MAX_WAIT_MS = 86_400_000


class LiveGate:
    """Feeds the loop from sockets and pipes. ``wakeups`` counts returns from the poll, for tests of idleness.

    If nothing comes back for ``step_timeout_s`` while a microbatch is in flight, a stage is stuck: the engine ends, and
    every request's error names the stage.
    """

    def __init__(self, context: GateContext) -> None:
        self._inbox = context.inbox
        self._pipeline = context.pipeline
        self._control = context.control
        self._clock = context.clock
        self._idle_audit = IdleAudit(context.scheduler, context.clock)
        self._settings = context.settings
        self._stuck_stage = context.stuck_stage
        self._completions_bound = context.limits.depth
        # The microbatches in flight, and the time since which the oldest is awaited.
        self._launched: deque[Microbatch] = deque()
        self._waiting_since = 0.0
        self._watch = StepWatch(self._report_stuck)
        self._completion_sources = tuple(context.pipeline.wake_sources())
        self._poller = zmq.Poller()
        self._readable: dict[Any, int] = {}
        self._dead: ProcessDied | None = None
        self._nodes: dict[str, str] = {}
        self._ended = False
        self.wakeups = 0

    def __enter__(self) -> Self:
        # Polls the ZMQ sockets, not their file descriptors, which are edge-triggered: waiting on one loses the wake-up
        # of a message that arrived between the last read and the wait.
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._control.fileno(), zmq.POLLIN)
        for source in self._completion_sources:
            self._poller.register(source, zmq.POLLIN)
        if (grammars := self._pipeline.answer_source()) is not None:
            self._poller.register(grammars, zmq.POLLIN)
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Wait for the next event. Returns None after a shutdown.

        Raises ProcessDiedError if a process of the engine has died; for a stage, after the step that told the
        scheduler. Raises IntegrityError if the books of an idle engine do not balance: continuing would serve wrong
        tokens.
        """
        if self._dead is not None:
            raise ProcessDiedError(self._dead.process, self._dead.cause, self._dead.node)
        busy = previous is not None and previous.again
        deadline = previous.deadline if previous is not None else None
        if previous is not None and not busy:
            self._idle_audit.look()
        if previous is not None and previous.microbatch is not None:
            self._note_launch(previous.microbatch)
        while True:
            due = self._due()
            self._wait(earliest(deadline, due), busy or self._pipeline.ready)
            if self._ended:
                return None
            launched = len(self._launched)
            events = self._take_events(busy=busy)
            now = self._clock.now()
            if len(self._launched) < launched:
                self._waiting_since = now
            elif due is not None and now >= due and self._dead is None:
                events.append(self._give_up())
            if events or busy or (deadline is not None and now >= deadline):
                return Step(tuple(events), now)

    def _note_launch(self, microbatch: Microbatch) -> None:
        if not self._launched:
            self._waiting_since = self._clock.now()
        self._launched.append(microbatch)

    def _limit_s(self) -> float | None:
        """Return the time limit of the oldest microbatch in flight; None without one or without a limit.

        Loading new weights may take as long as a start.
        """
        limit_s = self._settings.step_timeout_s
        if not limit_s or not self._launched:
            return None
        return max(limit_s, self._settings.start_timeout_s) if self._launched[0].is_control else limit_s

    def _due(self) -> float | None:
        """Return when a result of the stages is due; None if nothing is in flight on them."""
        limit_s = self._limit_s() if self._completion_sources else None
        return None if limit_s is None else self._waiting_since + limit_s

    def _give_up(self) -> PipelineFailed:
        """Return the event that names the stuck stage, after the time limit. The step that takes it is the last one."""
        number = self._launched[0].id
        assert self._stuck_stage is not None, "only stage processes have completion sources"
        process, doing = self._stuck_stage(number)
        return self._die_with(process, self._overdue(number) + doing)

    def _overdue(self, number: int) -> str:
        return f"microbatch {number} did not come back within {self._limit_s()} s (step_timeout_s): "

    def _report_stuck(self, where: str) -> None:
        """Send the final message of a process that computes the model itself. Runs in the watch's thread."""
        error = self._overdue(self._launched[0].id) + f"this process computes it, and is at\n{where}"
        self._control.send(Dying(error=error, traceback=error, expected=True))

    def _die_with(self, process: str, cause: str) -> PipelineFailed:
        node = self._nodes.get(process, "")
        self._dead = ProcessDied(process=process, cause=cause, node=node)
        return PipelineFailed(process=process, cause=cause, node=node)

    def _wait(self, deadline: float | None, work_is_there: bool) -> None:
        """Block until a source is readable or the deadline is due; do not block if there is already work."""
        if work_is_there:
            timeout_ms: int | None = 0
        elif deadline is None:
            timeout_ms = None
        else:
            # Rounded up, because waking a fraction of a millisecond early would spin until the deadline.
            timeout_ms = math.ceil(min(max(0.0, deadline - self._clock.now()) * 1000, MAX_WAIT_MS))
        self._readable = dict(self._poller.poll(timeout_ms))
        self.wakeups += 1
        if self._control.fileno() in self._readable:
            self._listen()

    def _listen(self) -> None:
        """Take one message from the supervisor; another one keeps the pipe readable for the next poll."""
        match self._control.receive():
            case Shutdown():
                self._ended = True
            case ProcessDied() as death if death.process.startswith(STAGE_PREFIX):
                self._dead = death
            case ProcessDied() as death:
                raise ProcessDiedError(death.process, death.cause, death.node)
            case Serving() as serving:
                self._nodes = serving.nodes
            case None:
                return

    def _take_events(self, *, busy: bool) -> list[Event]:
        """Take completions first, then messages in arrival order, including any that arrived during a computation.

        Skips sources that the poll found empty: an empty read costs as much as a full one. A ``busy`` step may launch
        more, so it does not wait for a computation in this process that takes more work: a GPU would idle.
        """
        if self._dead is not None:
            return [PipelineFailed(process=self._dead.process, cause=self._dead.cause, node=self._dead.node)]
        readable, sources = self._readable, self._completion_sources
        computes = self._pipeline.ready and not (busy and self._pipeline.takes_more)
        events: list[Event] = []
        if computes or any(source in readable for source in sources):
            self._take_completions(events)
        events.extend(self._pipeline.answers())
        if computes or any(source not in sources for source in readable):
            events.extend(self._inbox.drain(MAX_MESSAGES_A_STEP))
        return events

    def _take_completions(self, events: list[Event]) -> None:
        """Take the completions of one read; later ones wake the gate again."""
        while len(events) < self._completions_bound:
            completion = self._next_completion()
            if completion is None:
                return
            if isinstance(completion, PipelineFailed):
                events.append(self._die_with(completion.process, completion.cause))
                return
            events.append(completion)
            if self._launched:
                self._launched.popleft()
            # Without a source this process computes each completion: messages must not wait for all of them.
            if not self._completion_sources or not self._pipeline.ready:
                return

    def _next_completion(self) -> PipelineEvent | None:
        if self._completion_sources:
            return self._pipeline.next_completion(0)
        with self._watch.computing(self._limit_s()):
            return self._pipeline.next_completion(0)


# An audit costs 2 to 4 us per node of the prefix tree: 0.5 ms with a cache of 1,000 pages, 20 ms with 16,000. A message
# that arrives meanwhile waits, so the gate audits at most once a minute.
AUDIT_INTERVAL_S: Final = 60.0


class IdleAudit:
    """Audits an idle engine in production before it waits. Causes no wake-up and changes nothing."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._last = -math.inf

    def look(self) -> None:
        """Audit the engine if it is fully idle and the last audit is old enough. Raises IntegrityError."""
        if not self._scheduler.is_fully_idle:
            return
        now = self._clock.now()
        if now - self._last >= AUDIT_INTERVAL_S:
            self._last = now
            audit(self._scheduler)
