"""A registered script as a target of the search, which runs it repeatedly with an action added at one of its yields."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from engine.core.errors import IntegrityError
from engine.core.messages import Generate
from engine.core.scheduler import StepRecord
from scripted.core.action import Action
from scripted.core.placed_action import Placed
from scripted.core.run import Cell
from scripted.core.schedule import Schedule
from scripted.report.failure import FailureReport, ScriptError
from scripted.script.scripted_test import ScriptedTest
from scripted.search.execution import Failure, Outcome
from scripted.search.strategies import Drawn
from scripted_lockstep.actions import FailStage, StartRequest
from scripted_lockstep.tiers.sim.runner import EngineSim

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# Steps of the script after the last added event; then the harness drains the engine.
_AFTER_LIMIT_STEPS: Final = 300


class ScriptTarget:
    """A registered script in the sim tier, with an event added at one of its yields.

    After an unexpected event the script's own assertions need not hold: only the engine's invariants and the oracle
    count, and the script ends at its first failed assertion.
    """

    rejoined: int = 0

    def __init__(self, test: ScriptedTest) -> None:
        self._test = test
        # Not required, because the added event may close a window that the script must reach.
        self._options = msgspec.structs.replace(test.options, must_reach=(), must_step=False)
        self._arguments = _first_arguments(test)
        self._yields = 0
        self._rids: list[StartRequest] = []
        self.outcome = self._run(())
        self.base = Schedule(test.config, tuple(Placed(1, start) for start in self._rids))

    @property
    def steps(self) -> int:
        """The number of the script's yields without additions."""
        return self._yields

    def is_distinct(self, step: int, action: Action) -> bool:
        """Return True: the states between the script's yields are unknown."""
        del step, action
        return True

    def execute(self, *extra: Placed) -> Outcome:
        """Run the script with additions; an addition's step is the yield before which it happens."""
        return self._run(extra)

    def execute_drawn(self, drawn: Drawn) -> Outcome:
        """Run it with randomly drawn actions, regardless of the state."""
        for step in drawn.steps:
            drawn.come(step, lambda action: Cell(action.kind, "", ""))
        return self._run(drawn.placed)

    def _run(self, extra: tuple[Placed, ...]) -> Outcome:
        failure: Failure | None = None
        unreached: list[Placed] = []

        def injected(t: BaseContext) -> Generator[None, None, None]:
            yield from self._with_extra(t, extra, unreached)

        try:
            EngineSim(self._test.config).run(injected, options=self._options)
        except ScriptError as exc:
            failure = _failure_of(exc)
        return Outcome(failure, self._yields, tuple(unreached), (), ())

    def _with_extra(
        self, t: BaseContext, extra: tuple[Placed, ...], unreached: list[Placed]
    ) -> Generator[None, None, None]:
        script, number = self._test.script(t, **self._arguments), 0
        added = False
        while True:
            try:
                next(script)
            except StopIteration:
                break
            except Exception as exc:
                if not added or isinstance(exc, IntegrityError):
                    raise
                break
            number += 1
            if added and number > extra[-1].step + _AFTER_LIMIT_STEPS:
                break  # The script may wait for a condition that the event has made impossible.
            for placed in extra:
                if placed.step == number:
                    added = True
                    if not _do(t, placed.action):
                        unreached.append(placed)
            yield
        if any(isinstance(placed.action, FailStage) for placed in extra):
            yield from _spend_failure(t)
        if not extra:
            self._yields = number
            self._rids = _starts_of(t)


def _spend_failure(t: BaseContext) -> Generator[None, None, None]:
    """Consume an injected failure that no microbatch of the script hit, so that the harness's own steps do not."""
    if t.scheduler.failure is None and t.scheduler.books.is_awake and not t.state.paused:
        t.release_results()
        yield from t.run_until_finished(t.start_req(prompt_len=1, max_new_tokens=1))


def _first_arguments(test: ScriptedTest) -> dict[str, object]:
    """Return the first set of values with which pytest would parametrize the script."""
    arguments: dict[str, object] = {}
    for mark in getattr(test.script, "pytestmark", ()):
        if mark.name == "parametrize":
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            first = getattr(mark.args[1][0], "values", mark.args[1][0])
            arguments |= dict(zip(names, first if isinstance(first, tuple | list) else [first], strict=True))
    return arguments


def _starts_of(t: BaseContext) -> list[StartRequest]:
    history: Sequence[StepRecord] = t.run.records
    events = [event for record in history for event in record.events if isinstance(event, Generate)]
    return [StartRequest(rid=event.rid, prompt=len(event.prompt_ids), priority=event.priority) for event in events]


def _do(t: BaseContext, action: Action) -> bool:
    """Call the verb of an action. Returns False if it had no effect or the engine refused it."""
    try:
        return action.perform(t)
    except Exception as exc:
        if isinstance(exc, IntegrityError):
            raise
        return False


def _failure_of(exc: ScriptError) -> Failure:
    report = exc.report
    assert isinstance(report, FailureReport), f"not a script of the engine: {report}"
    kind, _, text = report.error.partition(": ")
    step = report.log.steps[-1].step if report.log and report.log.steps else 0
    return Failure(kind, text or report.error, step, f"{type(exc).__name__}: {kind}")
