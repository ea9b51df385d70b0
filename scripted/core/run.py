"""Runs a schedule: the gate feeds its actions to a machine's loop, in virtual time, and judges every step.

One process, no sockets. After the last action, the gate settles the run: it releases held results, ends pauses and lets
deadlines pass. It knows no scheduler: the schedule's adapter makes the parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Final, NoReturn, cast

import msgspec

from scripted.core.account import Life
from scripted.core.action import Action, RunLike
from scripted.core.adapters import adapter_named
from scripted.core.base_adapter import BaseAdapter
from scripted.core.clock import VirtualClock
from scripted.core.common_actions import AdvanceClock, ReleaseResults
from scripted.core.machine import ConfigT, DeviceT, EventT, MachineT, OutputT, RecordT, StepT
from scripted.core.oracle import OracleT
from scripted.core.phrases import text_of
from scripted.core.placed_action import Placed
from scripted.core.promises.asked_twice import HasQueries, check_queries
from scripted.core.promises.cached_prefixes import check_prefixes
from scripted.core.promises.liveness import Liveness
from scripted.core.promises.told_ends import ListsRequests, check_told
from scripted.core.promises.waste import EmptySteps, TellsWork
from scripted.core.protocol import Adapter, DeclaresWindows, violations_of, windows_of
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.results import Results
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation

# Far more steps than any workload takes: a schedule not settled by then never is, unless its requests need more.
STEPS_LIMIT: Final = 4_000
# How many times the limit they may need; it takes seconds.
MORE_STEPS: Final = 4
# Consecutive steps without events that do nothing and ask for another step. A scheduler may do bookkeeping without a
# visible effect, one block a step at the slowest, and workloads have a few dozen blocks; healthy ones take none.
EMPTY_STEPS_LIMIT: Final = 256
# Consecutive launches, at most half full, while a request that fits waits. A healthy scheduler makes fewer: a request
# may wait for an equal prompt, computed first so that its prefix can be hit, to pass the deepest pipeline.
WAITING_LIMIT: Final = 8
# Consecutive wake-ups by a timer without events and effects.
POLLS_LIMIT: Final = 64
# A run still busy this many steps after the last action may face an obstacle that only the run can remove.
PATIENCE_STEPS: Final = 1_000
# After each removed obstacle patience is half as long, down to this: dozens of sessions may keep their blocks.
LEAST_PATIENCE_STEPS: Final = 32
# How many waiting requests a message names.
_NAMED: Final = 3


class Cell(msgspec.Struct, frozen=True):
    """A cell of the coverage table: a kind of action in a state.

    ``state`` is its request's state, or the states of all requests if it acts on none.
    """

    kind: str
    state: str
    pipeline: str


class Phase(Enum):
    """The owner of the running code, to whom an exception is attributed."""

    HARNESS = "composing a step"
    ADAPTER = "in a step"
    ORACLE = "judging a step"


# The kind of the coverage cells of open windows.
WINDOW: Final = "window"
# Windows are checked once in this many steps: checking every step would take a tenth of a run.
WINDOW_STEPS: Final = 4

# Constants: looking up an enum's member costs four times as much, and every step sets three.
_HARNESS: Final = Phase.HARNESS
_ADAPTER: Final = Phase.ADAPTER
_ORACLE: Final = Phase.ORACLE


class Run(RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]):
    """One run of one schedule, with its machine, device and oracle.

    ``implied``: actions that the run added to settle the schedule. ``unreached``: placed actions that
    had nothing to act on. ``watch`` is called before each step is composed: the point where a run can be forked.
    """

    def __init__(
        self,
        schedule: Schedule[ConfigT],
        *,
        record: bool = False,
        watch: Callable[[Run], None] | None = None,
        parts: tuple[MachineT, DeviceT, OracleT] | None = None,
    ) -> None:
        super().__init__()
        self._schedule = schedule
        self.machine, self.device, self.oracle = parts or self.adapter.new_parts(schedule.config, record=record)
        self.clock = VirtualClock()
        self.watch = watch
        self.records = [] if record else None
        self.implied: list[Placed] = []
        self.unreached: list[Placed] = []
        self.cells: list[Cell] = []
        self.arrived = []
        self.step = 0
        self.phase = _HARNESS
        # The step in which patience last ran out and the run removed an obstacle.
        self._undone_at = 0
        self._patience_steps = PATIENCE_STEPS
        self.results = Results(self.machine.depth)
        self._previous: OutputT | None = None
        self._turn = 0
        self._empty_steps = 0
        self._polls = 0
        # The time of the last step.
        self._stepped_at = 0.0
        # Launches with room since a request moved or an action was applied.
        self._passed = 0
        self._liveness = Liveness()
        self._emptiness = EmptySteps()
        # Checked once: ``isinstance`` of a protocol takes longer than most checks.
        self._lists_requests = self.machine if isinstance(self.machine, ListsRequests) else None
        self._has_queries = self.machine if isinstance(self.machine, HasQueries) else None
        self._tells_work = self.machine if isinstance(self.machine, TellsWork) else None
        # Declared windows that have not been open so far.
        self._closed: tuple[str, ...] = windows_of(self.adapter)
        self.follow(schedule)

    def follow(self, schedule: Schedule[ConfigT], *, until: int = 0) -> None:
        """Continue with another schedule, which equals the current one up to this step.

        The run settles nothing before step ``until``, as if an action were placed there.
        """
        self._schedule = schedule
        self._last_step = max(schedule.last_step, until)
        # A recording has as many steps as its server made.
        self._steps_limit = max(STEPS_LIMIT, 2 * self._last_step)
        # The actions of each step that apply before its completions are taken, and those that apply after.
        self._before: dict[int, list[Placed]] = {}
        self._after: dict[int, list[Placed]] = {}
        for placed in schedule.placed:
            if placed.step > self.step:
                into = self._before if placed.action.is_control else self._after
                into.setdefault(placed.step, []).append(placed)

    @property
    def adapter(self) -> Adapter[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]:
        """The adapter of the schedule. A property, like the configuration: a fork copies attributes."""
        return adapter_named(self._schedule.of)

    @property
    def was_settled(self) -> bool:
        """Whether the schedule ended and the gate went on by itself."""
        return bool(self.implied) or self.is_winding_up

    @property
    def is_winding_up(self) -> bool:
        """Whether everything is settled, and the run gives the events of ``Adapter.finale``."""
        return self._turn > 0

    @property
    def config(self) -> ConfigT:
        return self._schedule.config

    @property
    def previous(self) -> OutputT | None:
        return self._previous

    @property
    def own_state(self) -> tuple[object, ...]:
        last = self._previous
        said = None if last is None else (last.again, last.deadline, last.microbatch is None)
        waits = any(life.computed is None for life in self.oracle.account.live.values())
        # If nobody knows what fits, nothing depends on the launches that left waiting requests out.
        passed = self._passed if waits and self.oracle.fit_together is not None else 0
        own = self.step, self.results, self._holding, self._turn, self._empty_steps, self.arrived, passed
        return *own, self.clock.now(), said

    # -- the gate protocol of the loop --

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None and self.records is not None and self.phase is _ADAPTER:
            step = self.adapter.new_step(tuple(self._events), self.clock.now())
            error = f"{type(exc).__name__}: {text_of(exc)}"
            self.records.append(self.adapter.record_step(step, None, self.machine, error))

    def next_step(self, previous: OutputT | None) -> StepT | None:
        if previous is not None:
            self._previous = previous
            self._judge(previous)
        self.begin_composing()
        if self.watch is not None:
            self.watch(self)
        return self.compose(previous)

    def begin_composing(self) -> None:
        """Begin the next step: the last one has been judged, and new events belong to the next one."""
        self.phase = _HARNESS
        self._events = []
        self._already = 0

    def compose(self, previous: OutputT | None) -> StepT | None:
        """Compose the next step; None when everything is settled. Raises Violation, in the last step that ran.

        Raises ScriptDefinitionError for requests that need far more steps than a run has.
        """
        if self.step >= self._steps_limit:
            self._raise_limit()
        self.step += 1
        try:
            return self._compose(previous)
        except Exception as exc:
            if isinstance(exc, (Violation, *violations_of(self.adapter))):
                self.step -= 1
            raise

    def _raise_limit(self) -> None:
        """Give requests that need more steps their steps. Raises for a run that should have ended by now."""
        limit, work = self._steps_limit, self.oracle.requested_work
        if work.steps <= limit:
            raise Violation(f"not settled after {limit} steps: {self.adapter.what_is_busy(self)}")
        if work.steps > (most := MORE_STEPS * limit):
            raise ScriptDefinitionError(
                f"a run has at most {most} steps, but its requests take {work.steps}, one after another: "
                f"{work.rid} alone asks for {work.new} new tokens; ask for fewer"
            )
        self._steps_limit = work.steps

    def _compose(self, previous: OutputT | None) -> StepT | None:
        if self.step in self._before:
            self._apply(self._before[self.step])
        self._take_due()
        adapter = self.adapter
        self._events += adapter.also_due(self)
        if self.arrived:
            self._events += self.arrived
            self.arrived = []
        if not self._events and self.step <= self._last_step and previous is not None and not previous.again:
            self._check_stands()
        if self.step in self._after:
            self._apply(self._after[self.step])
        if not self._events and self.step > self._last_step and self._is_still():
            if not self._settle():
                self._check_end()
                return None
        elif self.step >= max(self._last_step, self._undone_at) + self._patience_steps:
            # Obstacles may come one after another: patience starts over.
            self._undone_at = self.step
            if (undo := self.obstacle) is not None:
                self._patience_steps = max(LEAST_PATIENCE_STEPS, self._patience_steps // 2)
                self._imply(undo)
        self._check_progress(previous)
        # Consecutive empty steps have their own limit, whose message names the defect.
        is_watched = self.step > self._last_step and not self._turn and not self._empty_steps
        if is_watched and self._liveness.is_late(self.step):
            self._check_liveness()
        self.phase = _ADAPTER
        self._stepped_at = self.clock.now()
        return adapter.new_step(tuple(self._events), self._stepped_at)

    def fault(self, text: str) -> NoReturn:
        self.phase = _HARNESS
        raise HarnessError(text)

    # -- judging --

    def _judge(self, stepped: OutputT) -> None:
        self.phase = _ORACLE
        if stepped.microbatch is not None:
            self.results.launched(stepped.microbatch.id, self.step)
        if self.records is not None:
            step = self.adapter.new_step(tuple(self._events), self.clock.now())
            self.records.append(self.adapter.record_step(step, stepped, self.machine, None))
        self.oracle.account.step = self.step
        self.oracle.after_step(self._events, stepped, self.machine, self.device)
        if self.oracle.account.preemptions.wasted:
            self._check_waste()
        if self._lists_requests is not None:
            check_told(self.oracle.account.live, self._lists_requests)
        if self._has_queries is not None:
            check_queries(self.step, self._has_queries)
        if stepped.microbatch is not None:
            self._check_waits()
        if self._closed and not self.step % WINDOW_STEPS:
            self._look_through_windows()

    def _look_through_windows(self) -> None:
        """Note the declared windows that are open for the first time after this step."""
        windows = cast(DeclaresWindows, self.adapter).windows
        opened = [name for name in self._closed if windows[name](self)]
        if opened:
            self.cells += [Cell(WINDOW, name, "") for name in opened]
            self._closed = tuple(name for name in self._closed if name not in opened)

    def _check_stands(self) -> None:
        """Check a scheduler that waits for an event with nothing in flight: no open request may be able to continue.

        The end of the run is too late for this check: an event or a time limit may wake a request that should not have
        slept.
        """
        if len(self.results) or not self.oracle.account.live or self.adapter.obstacle(self) is not None:
            return
        previous = self._previous
        is_timed = previous is not None and previous.deadline is not None and self.oracle.waits_for_deadline(previous)
        if is_timed and previous is not None and (previous.deadline or 0) > self._stepped_at:
            return
        self.phase = _ORACLE
        stuck = self._named(self.oracle.could_go_on)
        why = f"; nothing is in flight, {self.adapter.what_is_busy(self)}"
        if is_timed and previous is not None:
            why += (
                f"; its timer was due at {previous.deadline:g} s, it is {self.clock.now():g} s, and no later one is set"
            )
        if stuck and self._would_go_on():
            why += "; a wake-up is lost: a step without any event does something, and the scheduler asked for none"
        self.oracle.account.check_stands(stuck, why)
        self.phase = _HARNESS

    def _would_go_on(self) -> bool:
        """Return whether a step without events does something; the run has failed and is not needed any more."""
        adapter = self.adapter
        if not isinstance(adapter, BaseAdapter):
            return False
        with contextlib.suppress(Exception):
            stepped = adapter.take_step(self, adapter.new_step((), self.clock.now()))
            return stepped.microbatch is not None or bool(stepped.replies)
        return False

    def _check_waits(self) -> None:
        """Check that no waiting request would fit into the batches that are launched with room."""
        account = self.oracle.account
        if account.moved:
            account.moved, self._passed = False, 0
            return
        self._passed += self.oracle.has_room
        if self._passed <= WAITING_LIMIT:
            return
        self._passed = 0
        lives = [life for life in account.live.values() if life.computed is None]
        waiting = self._named(lives)
        if waiting and self.obstacle is None and self.oracle.fit_together:
            raise Violation(
                f"a request waits although all that are open fit together: {', '.join(waiting)}; {WAITING_LIMIT} "
                f"batches with room were launched without it, {self.adapter.what_is_busy(self)}{self.oracle.fit_hint}",
                left_out=[life.message.rid for life in lives],
            )

    def _check_waste(self) -> None:
        """Judge needless losses, unless an obstacle remains that only the run can remove. Raises Violation."""
        preemptions = self.oracle.account.preemptions
        wasted, preemptions.wasted = preemptions.wasted, ""
        if self.obstacle is None:
            raise Violation(wasted)

    def _check_liveness(self) -> None:
        """Check that open requests end in time, unless an obstacle remains that only the run can remove."""

        def busy() -> list[str]:
            return [] if self.obstacle is not None else self._named(self.oracle.could_go_on)

        self.phase = _ORACLE
        self._liveness.check(self.step, self.oracle.work_left, busy)
        self.phase = _HARNESS

    def _named(self, lives: Iterable[Life]) -> list[str]:
        names = [f"{life.message.rid} ({life.state} since step {life.since})" for life in lives]
        more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
        return names[:_NAMED] + more

    def _check_progress(self, previous: OutputT | None) -> None:
        """Check that steps that only ask for another step come to an end."""
        if previous is None:
            return
        is_empty = self._is_empty(previous)
        if is_empty and self.step > self._last_step:
            self._empty_steps += previous.again
        else:
            self._empty_steps = self._polls = 0
        if self._empty_steps > EMPTY_STEPS_LIMIT:
            raise Violation(
                f"a step says again, but {EMPTY_STEPS_LIMIT} more in a row were given nothing and did nothing, and "
                f"each of them says again: a server would spin; {self.adapter.what_is_busy(self)}"
            )
        # After the check of steps in a row, whose text is more specific.
        if previous.microbatch is not None:
            self._emptiness.launched += 1
        elif is_empty and previous.again:
            self._emptiness.count()

    def _is_empty(self, previous: OutputT) -> bool:
        """Whether the last step was given nothing and did nothing."""
        if previous.microbatch is not None or previous.replies or self._events:
            return False
        return self._tells_work is None or not self._tells_work.is_working

    def _check_end(self) -> None:
        self.phase = _ORACLE
        self.oracle.at_end(self.machine)

    # -- composing --

    def _take_due(self) -> None:
        for microbatch_id in self.results.take_due(self.step):
            event = self.device.next_completion(0)
            assert event is not None, f"microbatch {microbatch_id} is due, but the device has nothing"
            self._events.append(event)

    def _is_still(self) -> bool:
        previous = self._previous
        moving = previous is not None and previous.again
        held = self._holding or self.results.stalled
        return not moving and (bool(held) or not len(self.results))

    def _settle(self) -> bool:
        """Remove one obstacle to the end of the run; False if there is none."""
        deadline = None if self._previous is None else self._previous.deadline
        if self._holding:
            self._imply(ReleaseResults())
            self._take_due()
        elif (undo := self.obstacle) is not None:
            self._check_stands()
            self._imply(undo)
            self._take_due()
        elif deadline is not None:
            self._check_stands()
            self._check_polls(deadline)
            self._imply(AdvanceClock(seconds=max(0.0, deadline - self.clock.now())))
        else:
            return self._wind_up()
        return True

    def _check_polls(self, deadline: float) -> None:
        """Check that timer wake-ups that do nothing come to an end."""
        self._polls += bool(self.oracle.account.live)
        if self._polls > POLLS_LIMIT:
            raise Violation(
                f"busy polling: {POLLS_LIMIT} wake-ups by a timer in a row were given nothing and did nothing, and the "
                f"next one is asked for at {deadline:g} s; {self.adapter.what_is_busy(self)}"
            )

    def _wind_up(self) -> bool:
        """Give the next events of ``Adapter.finale``; False when there are no more."""
        turn, self._turn = self._turn, self._turn + 1
        if not turn:
            self.phase = _ORACLE
            self.oracle.at_rest(self.machine)
            check_prefixes(self.machine, self.device)
            self.phase = _HARNESS
        self._events.extend(self.adapter.finale(self, turn))
        return bool(self._events)

    def note_implied(self, action: Action) -> None:
        self.implied.append(Placed(self.step, action))

    def _imply(self, action: Action) -> None:
        self._disturb()
        self._liveness.disturb()
        self.note_implied(action)
        action.apply(self)

    # -- actions --

    def _apply(self, here: Iterable[Placed]) -> None:
        for placed in here:
            action = placed.action
            reaches = action.is_start or action.reaches(self)
            if not action.is_start:
                self.cells.append(self.met_by(action))
            if reaches:
                # An action without effect excuses neither a wait nor a loss.
                self._disturb()
            else:
                self.unreached.append(placed)
            action.apply(self)

    def _disturb(self) -> None:
        """Note that an action from outside may change which requests should run."""
        self._passed = 0
        self.oracle.account.preemptions.disturb()

    # -- targets of actions --

    def met_by(self, action: Action) -> Cell:
        """Return the coverage cell of an action that is applied now."""
        return Cell(action.kind, *self.adapter.where(self, action.target_rid))

    @property
    def obstacle(self) -> Action | None:
        """The action that removes the next obstacle to an open request; None when nothing blocks one."""
        held = self.adapter.obstacle(self)
        if held is not None or self.oracle.paused is None or self.is_settled:
            return held
        return self.adapter.resuming
