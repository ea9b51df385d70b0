"""The scripted gate: the scheduler's loop stands still here between the steps of a script.

A run is one generator: bring the engine to idle, run the script, drain, compare with the requests run alone. Each
``yield`` of it lets one step run; in between the gate audits the engine and brings handles and clients up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Final, Self

from engine.clock import VirtualClock
from engine.errors import IntegrityError, ProcessDiedError
from engine.messages import (
    Abort,
    AbortAll,
    ClientMessage,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    OperatorEvent,
    PipelineFailed,
    ReleasePressure,
    Reply,
    UpdateWeights,
)
from engine.scheduler import Scheduler, Step, StepResult
from scripted.context import ScriptContext
from scripted.errors import BadCall, BudgetSpent, NotIdle, Overdue
from scripted.history import Handles, History
from scripted.ledger import Ledger
from scripted.oracle import Oracle
from scripted.results import Results
from scripted.run import Run, RunSource
from scripted.stop_watch import StopWatch
from scripted.waits import Steps, Wait
from scripted.world import World

__all__ = ["RESET_BUDGET_STEPS", "ScriptedGate"]

# After an abort of everything, only microbatches in flight stand between the engine and idleness: depth steps, and a
# margin.
RESET_BUDGET_STEPS: Final = 256
DRAIN_BUDGET_STEPS: Final = 20_000
# "Fully idle for two pipeline rotations" after the warm-up: what might still come would have come by then.
WARM_UP_ROTATIONS: Final = 2
WARM_UP_PROMPT_TOKENS: Final = 8
_HARNESS_CALL: Final = "harness"


class ScriptedGate:
    """Feeds the loop from scripts. ``source`` says which script comes next and takes how it ended."""

    def __init__(self, scheduler: Scheduler, world: World, source: RunSource) -> None:
        self.scheduler = scheduler
        self.world = world
        self.clock = VirtualClock()
        self.history = History()
        self.handles = Handles()
        self.results = Results(scheduler.limits.depth)
        self._stops = StopWatch(world.decoder)
        self._source = source
        self._oracle = Oracle(self)
        self._arrived: list[ClientMessage] = []
        self._injected: list[Event] = []
        self._interventions: list[OperatorEvent] = []
        self._failure: PipelineFailed | None = None
        self._kills = False
        # Kept while a script is audited after each step; it starts with an engine that is as good as new.
        self._ledger: Ledger | None = None
        self.last_replies: tuple[Reply, ...] = ()
        self._step: Step | None = None
        self._run: Run | None = None
        self._driver: Generator[None, None, None] | None = None

    # -- the gate protocol --

    def __enter__(self) -> Self:
        self._source.open()
        if self._source.warms_up:
            self._driver = self._warm_up()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self._note_death(exc)
            self._source.crashed(self, self._run, exc)
        self._source.close()

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Go on with the script until it lets a step run, then with the next script; None after the last one."""
        while True:
            if self._driver is None:
                self._run = self._source.next_run()
                if self._run is None:
                    return None
                self._driver = self._drive(self._run)
            try:
                if previous is not None:
                    self._take_result(previous)
                    self._check_stages()
                    self._audit(previous)
                next(self._driver)
                self._step = self._compose()
            except StopIteration:
                self._driver = None
                self._source.ended(self, self._run)
            except ProcessDiedError:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever a script raises is its result
                self._source.failed(self, self._run, self._as_found(exc))
                self._driver.close()
                self._driver = None
            else:
                self._source.progress(self, self._run)
                return self._step
            previous = None

    def _check_stages(self) -> None:
        """A stage that died is this script's to answer for, unless killing it was the point."""
        failure = self.scheduler.failure
        if failure is not None and not self._kills:
            raise ProcessDiedError(failure.process, failure.cause)

    def _as_found(self, exc: Exception) -> Exception:
        """What goes wrong before a script begins is the fault of what was there before it."""
        begun = self._run is None or self._run.context is not None
        if begun or isinstance(exc, (NotIdle, Overdue)):
            return exc
        dirty = NotIdle(f"the engine could not be reset: {type(exc).__name__}: {exc}")
        dirty.__cause__ = exc
        return dirty

    def _note_death(self, exc: BaseException) -> None:
        """Record the step that did not return, if the scheduler died in one."""
        recorded = self.history.records[-1].step if self.history.records else 0
        if self._step is not None and self.scheduler.step_number > recorded:
            self.history.add_death(self._step, self.scheduler, f"{type(exc).__name__}: {exc}")

    # -- for the verbs --

    def await_arrival(
        self,
        matches: Callable[[ClientMessage], bool],
        *,
        refused: Callable[[], bool] = lambda: False,
    ) -> ClientMessage | None:
        """Wait until the message of a verb is here; None when the server refused the call instead.

        A request that the scheduler would refuse is refused at once: that changes nothing in it, whenever it is told.
        """
        while True:
            for message in self.world.take_messages():
                self._arrived.append(message)
                if not matches(message):
                    continue
                if isinstance(message, Generate) and self._refuse(message):
                    break
                return message
            if refused():
                return None
            self.world.wait()

    def kill_stage(self, stage: int) -> None:
        """Kill a stage; the next step sees the failure first."""
        event = self.world.kill_stage(stage)
        assert isinstance(event, PipelineFailed), f"killing stage {stage} brought {event}"
        self._failure = event
        self._kills = True
        self.results.lose()

    def inject(self, *events: Event) -> None:
        """Give events of the harness itself to the next step."""
        self._injected += events

    def intervene(self, event: OperatorEvent) -> None:
        """Apply an operator's event now, between two steps; the next step counts it as its first."""
        self.scheduler.intervene(event)
        self._interventions.append(event)

    def flush(self) -> None:
        """Flush the cache in the next step; the engine is idle."""
        self.inject(FlushCache(call_id=_HARNESS_CALL))

    def _refuse(self, message: Generate) -> bool:
        ahead = [other for other in self._arrived if isinstance(other, Generate) and other is not message]
        refusal = self.scheduler.refusal_of(message, queued=len(ahead), taken=frozenset(other.rid for other in ahead))
        if refusal is None:
            return False
        self._arrived.remove(message)
        self.world.answer([refusal])
        return True

    # -- one run --

    def _drive(self, run: Run) -> Steps:
        self.world.limit_waits(min(run.options.result_timeout_s, run.options.timeout_s))
        yield from self._reset()
        context = ScriptContext(self)
        run.begin(context)
        yield from self._script_steps(run)
        context.check_waits()
        run.end(self.scheduler, spent=self._failure is not None)
        yield from self._drain()
        missed = [name for name in run.options.must_reach if not context.reached.get(name)]
        if missed:
            raise AssertionError(f"the script never reached {', '.join(map(repr, missed))}; reached: {context.reached}")
        if run.options.oracle and self._failure is None:
            run.compared = yield from self._oracle.compare(self.handles.all)

    def _script_steps(self, run: Run) -> Steps:
        """Pass on the script's yields, within its budget of steps."""
        context, script = run.context, run.script
        assert context is not None
        assert script is not None
        for steps in range(run.options.max_steps + 1):
            try:
                value = next(script)
            except StopIteration:
                return
            if value is not None:
                what = f"t.{value.what}" if isinstance(value, Wait) else repr(value)
                raise BadCall(f"a script yields nothing, got {what}; write 'yield from {what}' or 'yield'")
            context.check_waits()
            if steps == run.options.max_steps:
                spent = BudgetSpent(f"the script ran its max_steps={steps} steps; {context.state}")
                script.throw(spent)
                raise spent
            yield

    def _reset(self) -> Steps:
        """Bring the engine to the state of a new one. Raises NotIdle, naming what is left, if it does not get there."""
        self.history.recording = False
        self._ledger = None
        self._let_go()
        # What the last script left is aborted and told so before its connections are dropped: a late abort from the
        # front end could otherwise hit the next script's request of the same rid.
        yield from self._quieten()
        self.world.clients.forget()
        if self.scheduler.counters.weights_version:
            yield from self._restore_weights()
        self.flush()
        yield
        if not self.scheduler.is_fully_idle or self.scheduler.memory.pages.cached:
            raise NotIdle(f"the cache could not be flushed: {self.scheduler.books.what_is_busy()}")
        self._start_over()

    def _let_go(self) -> None:
        """Release what a script holds back or has stopped."""
        self.results.release(None)
        for stage in sorted(self.results.stalled):
            self.world.resume_stage(stage)
        self.results.stalled.clear()

    def _quieten(self) -> Steps:
        """Abort everything, what has just arrived included, and run until nothing is left."""
        self.inject(ReleasePressure(), ContinueGeneration(call_id=_HARNESS_CALL))
        self._arrived.append(AbortAll())
        yield
        for _ in range(RESET_BUDGET_STEPS):
            # Looked at here as well: the predicate itself may be what a mutant has broken.
            if self.scheduler.is_fully_idle and not self.scheduler.books.in_flight:
                return
            yield
        raise NotIdle(
            f"the engine did not get idle within {RESET_BUDGET_STEPS} steps after everything was aborted: "
            f"{self.scheduler.books.what_is_busy()}"
        )

    def _restore_weights(self) -> Steps:
        """Take back the weights that the engine was started with."""
        version = self.scheduler.counters.weights_version
        self.inject(UpdateWeights(call_id=_HARNESS_CALL))
        for _ in range(RESET_BUDGET_STEPS):
            yield
            if self.scheduler.counters.weights_version > version:
                return
        raise NotIdle(f"the engine's own weights did not come back within {RESET_BUDGET_STEPS} steps")

    def _start_over(self) -> None:
        self.world.start_over()
        self.world.take_messages()
        self.scheduler.start_over()
        self.clock.reset()
        self.results.start_over()
        self.history.start_over()
        self.handles.start_over()
        self.history.recording = True
        audited = self._run is not None and self._run.options.check_every_step
        self._ledger = Ledger(self.scheduler.limits) if audited else None

    def _drain(self) -> Steps:
        """What a script leaves behind must end by itself or by an abort, and every client must have been told once."""
        self.history.recording = False
        if self._failure is not None:
            return
        self._let_go()
        yield from self._quieten()
        self.scheduler.audit()
        self._check_clients()

    def _check_clients(self) -> None:
        for handle in self.handles.all:
            if handle.client.terminal_answers != 1 and handle.client.status is not None and not handle.client.dropped:
                raise AssertionError(
                    f"the client of {handle.rid} got {handle.client.terminal_answers} terminal answers: {handle.client}"
                )

    def _warm_up(self) -> Steps:
        """One real request, then quiet for two rotations of the pipeline."""
        self.history.recording = False
        context = ScriptContext(self, rid_prefix="warm-up")
        r = context.start_req(prompt_len=WARM_UP_PROMPT_TOKENS, max_new_tokens=2, ignore_eos=True)
        yield from context.run_until_finished(r)
        for _ in range(WARM_UP_ROTATIONS * self.scheduler.limits.depth):
            if not self.scheduler.is_fully_idle:
                raise NotIdle(f"the engine was not idle after its warm-up: {self.scheduler.books.what_is_busy()}")
            yield

    # -- one step --

    def _compose(self) -> Step:
        """The next step's events: interventions, completions that are due, messages in the order of their arrival."""
        events: list[Event] = [*self._interventions]
        if self._failure is not None and self.scheduler.failure is None:
            events.append(self._failure)
        for microbatch_id in self.results.take_due(self.scheduler.step_number + 1):
            event = self.world.take_completion(microbatch_id)
            events.append(event)
            if isinstance(event, PipelineFailed):
                self._failure = event
                self.results.lose()
                break
            assert isinstance(event, Completion)
            assert event.microbatch_id == microbatch_id, f"{event} came back, microbatch {microbatch_id} was due"
        events += self._injected
        events += self._arrived
        self._injected, self._arrived, self._interventions = [], [], []
        return Step(tuple(events), self.clock.now())

    def _take_result(self, result: StepResult) -> None:
        """Note what the last step did."""
        assert self._step is not None
        if result.microbatch is not None:
            self.results.launched(result.microbatch.id, result.step)
        self.last_replies = result.replies
        self.history.add(self._step, result, self.scheduler)
        live = self.handles.live()
        self.handles.update(result.replies, self.scheduler)
        stopped: list[str] = []
        if result.replies:
            shown, stopped = self._stops.follow(result.replies, live)
            views = {rid: handle.client for rid, handle in live.items()}
            self.world.clients.settle(shown, views, self.handles.open_calls())
        self._arrived += self._messages_with_stops(stopped)

    def _messages_with_stops(self, rids: list[str]) -> list[ClientMessage]:
        """What has arrived, and the front end's aborts of these requests behind it, in the order of their outputs."""
        messages = self.world.take_messages()
        while len(stops := _stops_among(messages)) < len(rids):
            self.world.wait()
            messages += self.world.take_messages()
        others = [message for message in messages if message not in stops.values()]
        return others + [stops[rid] for rid in rids]

    def _audit(self, previous: StepResult) -> None:
        """Check after a step what the engine did, its books against themselves and the ledger, and its KV."""
        if self._run is not None and not self._run.options.check_every_step:
            return
        if self._ledger is not None and self._step is not None:
            self._ledger.follow(self._step.events, previous)
        self.scheduler.check_integrity()
        if self._ledger is not None:
            self._ledger.compare(self.scheduler)
        corruptions = self.world.corruptions()
        if corruptions:
            raise IntegrityError(f"a request read KV that is not its own: {corruptions[0]}")


def _stops_among(messages: Iterable[ClientMessage]) -> dict[str, Abort]:
    """The aborts by which the front end ends requests whose stop string it found, by rid."""
    return {m.rid: m for m in messages if isinstance(m, Abort) and m.finish_reason is FinishReason.STOP}
