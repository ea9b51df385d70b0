"""The scripted gate: the scheduler's loop waits here between the steps of a script.

A run is one generator: bring the engine to idle, run the script, drain, compare with the requests run alone. Each
``yield`` of it lets one step run; in between the gate audits the engine and brings handles and clients up to date.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Self

from engine.errors import ProcessDiedError
from engine.integrity import audit
from engine.messages import Abort, ClientMessage, FinishReason
from engine.scheduler import Scheduler, Step, StepResult
from scripted.adapters.lockstep.oracle.counters import check_sizes
from scripted.adapters.lockstep.oracle.delivery import check_answers
from scripted.adapters.lockstep.oracle.growth import check_growth, check_stages
from scripted.adapters.lockstep.oracle.step_checks import Checks
from scripted.adapters.lockstep.oracle.tokens_alone import AloneRuns
from scripted.errors import BadCall, BudgetSpent, NotIdle, Overdue
from scripted.gate.reset import drain, flush, reset, restore_weights, warm_up
from scripted.gate.run import RunSource, ScriptRun
from scripted.gate.stop_strings import StopStrings
from scripted.rig.rig import Rig, check_nothing
from scripted.rig.world import World
from scripted.script.causes import causes_of
from scripted.script.t import ScriptContext
from scripted.script.wait import Steps, words_of_yielded
from scripted.script.windows import check_reached

__all__ = ["ScriptedGate"]

_NO_STEP = "the scheduler was killed, so no step can run; ask what its clients were told, for instance r.client.error"


class ScriptedGate:
    """Feeds the loop from scripts. ``source`` says which script comes next and takes how it ended."""

    def __init__(self, scheduler: Scheduler, world: World, source: RunSource) -> None:
        self.rig = Rig(scheduler, world)
        self._source = source
        self._stops = StopStrings(world.decoder)
        self._alone = AloneRuns(self.rig)
        # Kept while a script is checked after each step; they start with an engine that is as good as new.
        self._checks: Checks | None = None
        # What the stages held before the first script.
        self._stage_sizes: Mapping[str, int] | None = None
        self._step: Step | None = None
        self._run: ScriptRun | None = None
        self._context: ScriptContext | None = None
        self._driver: Generator[None, None, None] | None = None

    # -- the gate protocol --

    def __enter__(self) -> Self:
        self._source.open()
        if self._source.warms_up:
            self._driver = warm_up(self.rig)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self._note_death(exc)
            self._source.crashed(self.rig, self._run, exc)
        self._source.close()
        if self._context is not None:
            self._context.end()

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
                self._step = self.rig.compose()
            except StopIteration:
                self._driver = None
                self._source.ended(self.rig, self._run)
            except ProcessDiedError:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever a script raises is its result
                self._source.failed(self.rig, self._run, self._as_found(exc))
                self._driver.close()
                self._driver = None
            else:
                self._source.progress(self.rig, self._run)
                return self._step
            previous = None

    def _check_stages(self) -> None:
        """A stage that died fails this script, unless the script killed it."""
        failure = self.rig.scheduler.failure
        if failure is not None and not self.rig.kills:
            raise ProcessDiedError(failure.process, failure.cause, failure.node)

    def _as_found(self, exc: Exception) -> Exception:
        """A failure before a script begins is the fault of what ran before it."""
        begun = self._run is None or self._run.context is not None
        if begun or isinstance(exc, (NotIdle, Overdue)):
            return exc
        dirty = NotIdle(f"the engine could not be reset: {type(exc).__name__}: {exc}")
        dirty.__cause__ = exc
        return dirty

    def _note_death(self, exc: BaseException) -> None:
        """Record the step that did not return, if the scheduler died in one."""
        history, scheduler = self.rig.history, self.rig.scheduler
        recorded = history.records[-1].step if history.records else 0
        if self._step is not None and scheduler.step_number > recorded:
            history.add_death(self._step, scheduler, f"{type(exc).__name__}: {exc}")

    # -- one run --

    def _drive(self, run: ScriptRun) -> Steps:
        rig = self.rig
        rig.world.limit_waits(min(run.options.result_timeout_s, run.options.timeout_s))
        self._checks = None
        if self._context is not None:
            self._context.end()
        yield from reset(rig)
        if self._stage_sizes is None:
            self._stage_sizes = rig.world.stage_sizes()
        self._checks = Checks(rig.scheduler.limits) if run.options.check_every_step else None
        rig.check_refusal = check_nothing if self._checks is None else self._checks.clients.check_refusal
        context = self._context = ScriptContext(rig, must_reach=run.options.must_reach)
        run.begin(context)
        yield from self._script_steps(run)
        context.check_waits()
        if run.options.must_step and not rig.scheduler.step_number:
            raise BadCall("the script ended without a step, so nothing was tested; a yield lets one step run")
        run.end(rig.scheduler, spent=rig.failure is not None or rig.is_dead)
        if rig.is_dead:
            check_answers(rig.handles.all)
        elif rig.failure is None:
            yield from drain(rig)
            check_answers(rig.handles.all)
            if self._checks is not None:
                self._checks.at_rest(rig.scheduler)
            yield from flush(rig)
            check_sizes(rig.scheduler)
            check_growth(rig.scheduler)
            loras = rig.scheduler.loras.resident
            check_stages(self._stage_sizes, rig.world.stage_sizes(), loras=loras)
        check_reached(run.options.must_reach, context.reached)
        if run.options.oracle and rig.failure is None and not rig.is_dead:
            run.compared = yield from self._alone.compare(rig.handles.all, lambda: restore_weights(rig))

    def _script_steps(self, run: ScriptRun) -> Steps:
        """Pass on the script's yields, within its budget of steps."""
        context = run.context
        assert context is not None
        for steps in range(run.options.max_steps + 1):
            try:
                value = run.resume()
            except StopIteration:
                return
            if value is not None:
                raise BadCall(f"a script yields nothing, got {words_of_yielded(value)}")
            context.check_waits()
            if self.rig.is_dead:
                run.stop(BadCall(_NO_STEP))
            if steps == run.options.max_steps:
                causes = "; ".join(causes_of(self.rig))
                spent = BudgetSpent(
                    f"the script ran its max_steps={steps} steps; {context.state}"
                    + (f"; {causes}" if causes else "; @scripted(..., max_steps=N) allows more")
                )
                run.stop(spent)
            yield

    # -- one step --

    def _take_result(self, result: StepResult) -> None:
        """Note what the last step did."""
        assert self._step is not None
        rig = self.rig
        if result.microbatch is not None:
            rig.results.launched(result.microbatch.id, result.step)
        rig.grammars.ordered(result.grammars)
        rig.last_replies = result.replies
        self._alone.note(self._step.events, result.replies)
        rig.history.add(self._step, result, rig.scheduler)
        live = rig.handles.live()
        launched = () if result.microbatch is None else result.microbatch.rids
        rig.handles.update(result.replies, rig.scheduler, launched)
        stopped: list[str] = []
        if result.replies:
            shown, stopped = self._stops.follow(result.replies, live)
            views = {rid: handle.client for rid, handle in live.items()}
            rig.world.clients.settle(shown, views, rig.handles.open_calls())
        rig.arrived += self._messages_with_stops(stopped)

    def _messages_with_stops(self, rids: list[str]) -> list[ClientMessage]:
        """What has arrived, then the front end's aborts of these requests, in the order of their outputs."""
        world = self.rig.world
        messages = world.take_messages()
        while len(stops := _stops_among(messages)) < len(rids):
            world.wait()
            messages += world.take_messages()
        others = [message for message in messages if message not in stops.values()]
        return others + [stops[rid] for rid in rids]

    def _audit(self, previous: StepResult) -> None:
        """Check after a step what the engine did; before a script, in its reset, the engine's own books alone."""
        if self._run is not None and not self._run.options.check_every_step:
            return
        scheduler = self.rig.scheduler
        if self._checks is None or self._step is None:
            audit(scheduler)
        else:
            events, corruptions = self._step.events, self.rig.world.corruptions()
            self._checks.after_step(events, previous, scheduler, corruptions=corruptions)


def _stops_among(messages: Iterable[ClientMessage]) -> dict[str, Abort]:
    """The aborts by which the front end ends requests whose stop string it found, by rid."""
    return {m.rid: m for m in messages if isinstance(m, Abort) and m.finish_reason is FinishReason.STOP}
