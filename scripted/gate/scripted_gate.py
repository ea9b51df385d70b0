"""The scripted gate: the scheduler's loop stands still here between the steps of a script.

A run is one generator: bring the engine to idle, run the script, drain, compare with the requests run alone. Each
``yield`` of it lets one step run; in between the gate audits the engine and brings handles and clients up to date.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Self

from engine.errors import IntegrityError, ProcessDiedError
from engine.messages import Abort, ClientMessage, FinishReason
from engine.scheduler import Scheduler, Step, StepResult
from scripted.checks.ledger import Ledger
from scripted.errors import BadCall, BudgetSpent, NotIdle, Overdue
from scripted.gate.oracle import Oracle
from scripted.gate.reset import drain, reset, warm_up
from scripted.gate.run import Run, RunSource
from scripted.gate.stop_strings import StopStrings
from scripted.rig.rig import Rig
from scripted.rig.world import World
from scripted.script.t import ScriptContext
from scripted.script.waits import Steps, Wait

__all__ = ["ScriptedGate"]


class ScriptedGate:
    """Feeds the loop from scripts. ``source`` says which script comes next and takes how it ended."""

    def __init__(self, scheduler: Scheduler, world: World, source: RunSource) -> None:
        self.rig = Rig(scheduler, world)
        self._source = source
        self._stops = StopStrings(world.decoder)
        self._oracle = Oracle(self.rig)
        # Kept while a script is audited after each step; it starts with an engine that is as good as new.
        self._ledger: Ledger | None = None
        self._step: Step | None = None
        self._run: Run | None = None
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
        """A stage that died is this script's to answer for, unless killing it was the point."""
        failure = self.rig.scheduler.failure
        if failure is not None and not self.rig.kills:
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
        history, scheduler = self.rig.history, self.rig.scheduler
        recorded = history.records[-1].step if history.records else 0
        if self._step is not None and scheduler.step_number > recorded:
            history.add_death(self._step, scheduler, f"{type(exc).__name__}: {exc}")

    # -- one run --

    def _drive(self, run: Run) -> Steps:
        rig = self.rig
        rig.world.limit_waits(min(run.options.result_timeout_s, run.options.timeout_s))
        self._ledger = None
        if self._context is not None:
            self._context.end()
        yield from reset(rig)
        self._ledger = Ledger(rig.scheduler.limits) if run.options.check_every_step else None
        context = self._context = ScriptContext(rig)
        run.begin(context)
        yield from self._script_steps(run)
        context.check_waits()
        run.end(rig.scheduler, spent=rig.failure is not None)
        if rig.failure is None:
            yield from drain(rig)
            self._check_clients()
        missed = [name for name in run.options.must_reach if not context.reached.get(name)]
        if missed:
            raise AssertionError(f"the script never reached {', '.join(map(repr, missed))}; reached: {context.reached}")
        if run.options.oracle and rig.failure is None:
            run.compared = yield from self._oracle.compare(rig.handles.all)

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

    def _check_clients(self) -> None:
        for handle in self.rig.handles.all:
            if handle.client.terminal_answers != 1 and handle.client.status is not None and not handle.client.dropped:
                raise AssertionError(
                    f"the client of {handle.rid} got {handle.client.terminal_answers} terminal answers: {handle.client}"
                )

    # -- one step --

    def _take_result(self, result: StepResult) -> None:
        """Note what the last step did."""
        assert self._step is not None
        rig = self.rig
        if result.microbatch is not None:
            rig.results.launched(result.microbatch.id, result.step)
        rig.last_replies = result.replies
        rig.history.add(self._step, result, rig.scheduler)
        live = rig.handles.live()
        rig.handles.update(result.replies, rig.scheduler)
        stopped: list[str] = []
        if result.replies:
            shown, stopped = self._stops.follow(result.replies, live)
            views = {rid: handle.client for rid, handle in live.items()}
            rig.world.clients.settle(shown, views, rig.handles.open_calls())
        rig.arrived += self._messages_with_stops(stopped)

    def _messages_with_stops(self, rids: list[str]) -> list[ClientMessage]:
        """What has arrived, and the front end's aborts of these requests behind it, in the order of their outputs."""
        world = self.rig.world
        messages = world.take_messages()
        while len(stops := _stops_among(messages)) < len(rids):
            world.wait()
            messages += world.take_messages()
        others = [message for message in messages if message not in stops.values()]
        return others + [stops[rid] for rid in rids]

    def _audit(self, previous: StepResult) -> None:
        """Check after a step what the engine did, its books against themselves and the ledger, and its KV."""
        if self._run is not None and not self._run.options.check_every_step:
            return
        if self._ledger is not None and self._step is not None:
            self._ledger.follow(self._step.events, previous)
        self.rig.scheduler.check_integrity()
        if self._ledger is not None:
            self._ledger.compare(self.rig.scheduler)
        corruptions = self.rig.world.corruptions()
        if corruptions:
            raise IntegrityError(f"a request read KV that is not its own: {corruptions[0]}")


def _stops_among(messages: Iterable[ClientMessage]) -> dict[str, Abort]:
    """The aborts by which the front end ends requests whose stop string it found, by rid."""
    return {m.rid: m for m in messages if isinstance(m, Abort) and m.finish_reason is FinishReason.STOP}
