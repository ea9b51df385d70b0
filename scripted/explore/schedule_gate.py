"""The simulated gate: feeds the scheduler's own loop from a schedule, in virtual time, and judges every step.

One process, no torch, no HTTP. A schedule's actions become events here; what it leaves open is settled here: held
results come, a pause ends, a deadline passes. The same loop runs it that runs the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from engine.clock import VirtualClock
from engine.instruments import Pressure
from engine.memory import KVMemory
from engine.messages import Event, GetStats, OperatorEvent, PipelineFailed, ReleasePressure, Reply, SetPressure
from engine.scheduler import Scheduler, Step, StepRecord, StepResult
from scripted.actions import (
    Action,
    AdvanceClock,
    Flush,
    Placed,
    ReleaseResults,
    Relieve,
    Resume,
    ResumeStage,
    StartRequest,
)
from scripted.checks.step_checks import Checks
from scripted.checks.tokens_alone import check_tokens
from scripted.checks.violation import Violation
from scripted.explore.coverage import Cell, cell_of
from scripted.explore.schedule import Schedule, limits_of
from scripted.explore.silent_digests import SilentDigests
from scripted.rig.history import record_step
from scripted.rig.results import Results
from scripted.simulated_pipeline import SimulatedPipeline

__all__ = ["STEPS_LIMIT", "SimulatedGate"]

# Far beyond what any workload takes; a schedule that is not settled by then will never be.
STEPS_LIMIT: Final = 4_000


class SimulatedGate:
    """One run of one schedule, with its scheduler and pipeline. ``outbox`` of the loop is the gate itself.

    ``implied`` are the actions that settled what the schedule left open; ``unreached`` the placed ones that met nothing
    to act on. ``watch`` is called before each step is composed: the place where a run can be forked.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        record: bool = False,
        watch: Callable[[SimulatedGate], None] | None = None,
    ) -> None:
        self.limits = limits_of(schedule.config)
        self.scheduler = Scheduler(self.limits)
        if not record:
            self.scheduler.digests = SilentDigests()
        self.pipeline = SimulatedPipeline(self.limits)
        self.checks = Checks(self.limits)
        self.clock = VirtualClock()
        self.watch = watch
        self.records: list[StepRecord] | None = [] if record else None
        self.implied: list[Placed] = []
        self.unreached: list[Placed] = []
        self.cells: list[Cell] = []
        self.step = 0
        self._results = Results(self.limits.depth)
        self._events: list[Event] = []
        self._previous: StepResult | None = None
        self._holding = self._pressing = self._flushed = False
        self._interventions = 0
        self._calls = 0
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Go on with this schedule, which is the same as the old one up to the present step."""
        self._last_step = schedule.last_step
        # Of each step, what comes before its completions are taken and what comes after.
        self._before: dict[int, list[Placed]] = {}
        self._after: dict[int, list[Placed]] = {}
        for placed in schedule.placed:
            if placed.step > self.step:
                into = self._before if placed.action.is_control else self._after
                into.setdefault(placed.step, []).append(placed)

    # -- the gate protocol --

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None and self.records is not None and self.scheduler.step_number > len(self.records):
            result = StepResult(self.scheduler.step_number, None, (), again=False, deadline=None)
            self._record(result, error=f"{type(exc).__name__}: {exc}")

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Judge the last step and compose the next one; None when everything is settled. Raises Violation."""
        if previous is not None:
            self._previous = previous
            self._judge(previous)
        if self.watch is not None:
            self.watch(self)
        if self.step >= STEPS_LIMIT:
            raise Violation(f"not settled after {STEPS_LIMIT} steps: {self.scheduler.books.what_is_busy()}")
        self.step += 1
        self._events = []
        self._interventions = 0
        if self.step in self._before:
            self._apply(self._before[self.step])
        self._take_due()
        if self.step in self._after:
            self._apply(self._after[self.step])
        if not self._events and self.step > self._last_step and self._is_still() and not self._settle():
            self._check_end()
            return None
        return Step(tuple(self._events), self.clock.now())

    def send(self, replies: Sequence[Reply]) -> None:
        """The loop's outbox: the replies are judged with their step."""

    # -- judging --

    def _judge(self, result: StepResult) -> None:
        if result.microbatch is not None:
            self._results.launched(result.microbatch.id, self.step)
        if self.records is not None:
            self._record(result)
        self.checks.after_step(self._events, result, self.scheduler, corruptions=self.pipeline.corruptions)

    def _record(self, result: StepResult, *, error: str | None = None) -> None:
        assert self.records is not None
        step = Step(tuple(self._events), self.clock.now())
        self.records.append(record_step(step, result, self.scheduler, error=error))

    def _check_end(self) -> None:
        self.checks.at_end(self.scheduler)
        for life in self.checks.clients.lives:
            check_tokens(life, self.checks.clients.calls.weights)

    # -- composing --

    def _take_due(self) -> None:
        for microbatch_id in self._results.take_due(self.step):
            event = self.pipeline.next_completion(0)
            assert event is not None, f"microbatch {microbatch_id} is due, but the pipeline has nothing"
            self._events.append(event)

    def _is_still(self) -> bool:
        """Nothing will happen by itself."""
        previous = self._previous
        moving = previous is not None and previous.again
        held = self._holding or self._results.stalled
        return not moving and (bool(held) or not self._results.due_steps())

    def _settle(self) -> bool:
        """Undo one thing that stands in the way of an end; False when nothing does."""
        clients, deadline = self.checks.clients, None if self._previous is None else self._previous.deadline
        if self._holding:
            self._imply(ReleaseResults())
            self._take_due()
        elif self._results.stalled:
            self._imply(ResumeStage(stage=min(self._results.stalled)))
            self._take_due()
        elif self._pressing:
            self._imply(Relieve())
        elif clients.paused is not None and not clients.is_settled:
            self._imply(Resume())
        elif deadline is not None:
            self._imply(AdvanceClock(seconds=max(0.0, deadline - self.clock.now())))
        elif not self._flushed:
            self._flushed = True
            self.checks.at_rest(self.scheduler)
            self._imply(Flush())
            self._events.append(GetStats(call_id="stats"))
        else:
            return False
        return True

    def _imply(self, action: Action) -> None:
        self.implied.append(Placed(self.step, action))
        action.apply(self)

    # -- actions --

    def _apply(self, here: Iterable[Placed]) -> None:
        for placed in here:
            if not isinstance(placed.action, StartRequest):
                self.cells.append(cell_of(placed.action, self.scheduler))
                if not placed.action.reaches(self):
                    self.unreached.append(placed)
            placed.action.apply(self)

    # -- what an action acts on --

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return self.checks.clients.is_settled

    @property
    def is_paused(self) -> bool:
        """Generation is paused."""
        return self.checks.clients.paused is not None

    @property
    def is_holding(self) -> bool:
        """Results are held."""
        return self._holding

    @property
    def is_pressed(self) -> bool:
        """An operator keeps memory from requests."""
        return self._pressing

    @property
    def stalled_stages(self) -> set[int]:
        """Stages that are stopped."""
        return self._results.stalled

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        return rid in self.checks.clients.live

    def new_call_id(self) -> str:
        """The id of the next administrative call."""
        self._calls += 1
        return f"call-{self._calls}"

    def give(self, event: Event) -> None:
        """The next step sees this event."""
        self._events.append(event)

    def intervene(self, event: OperatorEvent) -> None:
        """Between two steps, as an operator does, and looked at right away. Raises Violation."""
        most = _most(self.scheduler.pressure)
        self.scheduler.pressure.intervene(event)
        self._events.insert(self._interventions, event)
        self._interventions += 1
        if isinstance(event, SetPressure):
            self._pressing = True
            self._check_pressure(event, most)
        elif isinstance(event, ReleasePressure):
            self._pressing = False

    def hold_results(self) -> None:
        """Keep results back from this step on."""
        self._holding = True
        self._results.hold()

    def release_results(self, count: int | None) -> None:
        """Let the oldest ``count`` through, or all and stop holding."""
        self._holding = self._holding and count is not None
        self._results.release(count)

    def stall_stage(self, stage: int) -> None:
        """Stop a stage: nothing comes back until it goes on."""
        self._results.stalled.add(stage)

    def resume_stage(self, stage: int) -> None:
        """Let a stopped stage go on."""
        self._results.stalled.discard(stage)

    def fail_next_step(self, stage: int) -> None:
        """Make a stage's next microbatch fail."""
        self.pipeline.fail_next_step(stage)

    def kill_stage(self, stage: int) -> None:
        """Kill a stage of an engine that lives."""
        if self.scheduler.failure is not None:
            return
        self.pipeline.kill_stage(stage)
        failed = self.pipeline.next_completion(0)
        assert isinstance(failed, PipelineFailed), f"killing stage {stage} brought {failed}"
        self._events.append(failed)
        self._results.lose()
        self._holding = False

    def _check_pressure(self, asked: SetPressure, most: tuple[int, ...]) -> None:
        counts = asked.leave_pages, asked.leave_rows, asked.leave_unlocked, asked.leave_window_pages
        for count, limit, left in zip(counts, most, _left(self.scheduler.memory), strict=True):
            if count is not None and left != min(count, limit):
                raise Violation(f"{count} of at most {limit} were to be left by {asked}, but {left} are")


def _most(pressure: Pressure) -> tuple[int, ...]:
    """Pages and rows that could be free, nodes that could be unlocked, window pages: by what requests own."""
    return (
        pressure.most_free_pages,
        pressure.most_free_rows,
        pressure.most_unlocked_nodes,
        pressure.most_free_window_pages,
    )


def _left(memory: KVMemory) -> tuple[int, ...]:
    """Pages and rows that are free, nodes that are unlocked, window pages that are free."""
    unlocked = sum(1 for node in memory.tree.nodes() if node.lock_ref == 0)
    window = 0 if memory.sliding_window is None else memory.sliding_window.pages.free
    return memory.pages.free, memory.rows.free, unlocked, window
