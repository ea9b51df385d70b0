"""What is searched: a base schedule or a registered script, run again and again with something added.

Both say how many steps they have, and run with additions; a target's text builds the same one in another process.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from engine.errors import IntegrityError
from engine.messages import Generate
from scripted.actions import Action, FailStage, Placed, StartRequest
from scripted.errors import ScriptError
from scripted.explore.execution import Failure, Outcome, Prefixes
from scripted.explore.schedule import Schedule
from scripted.explore.workloads import WORKLOADS, workload_named
from scripted.refusals import ScriptDefinitionError
from scripted.script.decorator import ScriptedTest
from scripted.script.loader import find_test
from scripted.sim.runner import ScriptedSim

__all__ = ["ScriptTarget", "Target", "is_one_word", "target_named"]

# Steps that a script still runs after the last added event; then the harness drains the engine.
_AFTER_LIMIT_STEPS: Final = 300
# Only a file that makes schedules is run to find one.
_SCENARIO: Final = re.compile(r"\bSchedule\b")


class Target(Protocol):
    """``base`` says what may be added; ``outcome`` is how it ends by itself."""

    base: Schedule
    outcome: Outcome

    @property
    def steps(self) -> int:
        """Steps that can be added to."""
        ...

    def execute(self, *extra: Placed) -> Outcome: ...


def target_named(target: str) -> Target:
    """The target of a workload's name, a schedule's text, or ``FILE::NAME`` of a script or a Schedule.

    Raises ScriptDefinitionError for anything else.
    """
    if "::" not in target:
        if is_one_word(target):
            return Prefixes(workload_named(target))
        return Prefixes(Schedule.parse(target))
    schedule = _schedule_in(target)
    return ScriptTarget(find_test(target)) if schedule is None else Prefixes(schedule)


def is_one_word(target: str) -> bool:
    """Whether a target is the name of something, and no schedule. Raises ScriptDefinitionError for a missing file."""
    if not target.strip() or target == "default" or any(sign in target for sign in "=; "):
        return False
    if target not in WORKLOADS and (Path(target).suffix or "/" in target):
        raise ScriptDefinitionError(f"there is no file {target!r} in {Path.cwd()}")
    return True


def _schedule_in(target: str) -> Schedule | None:
    """The Schedule that a file calls by this name, if it is one."""
    file, _, name = target.partition("::")
    if not Path(file).is_file() or not _SCENARIO.search(Path(file).read_text(encoding="utf-8")):
        return None
    value = runpy.run_path(file).get(name)
    return value if isinstance(value, Schedule) else None


class ScriptTarget:
    """A registered script in the sim tier, with one event more at one of its yields.

    What the script itself asserts does not hold with an event that it does not know: after the event only the engine's
    own invariants and the oracle count, and the script ends at its first failed assertion.
    """

    def __init__(self, test: ScriptedTest) -> None:
        self._test = test
        # The added event may close a window that the script must reach.
        self._options = msgspec.structs.replace(test.options, must_reach=(), must_step=False)
        self._arguments = _first_arguments(test)
        self._yields = 0
        self._rids: list[StartRequest] = []
        self.outcome = self._run(())
        self.base = Schedule(test.config, tuple(Placed(1, start) for start in self._rids))

    @property
    def steps(self) -> int:
        """Yields of the script when nothing is added."""
        return self._yields

    def execute(self, *extra: Placed) -> Outcome:
        """Run the script with additions; the step of one is the yield that it comes before."""
        return self._run(extra)

    def _run(self, extra: tuple[Placed, ...]) -> Outcome:
        failure: Failure | None = None
        unreached: list[Placed] = []

        def injected(t: Any) -> Generator[None, None, None]:
            yield from self._with_extra(t, extra, unreached)

        try:
            ScriptedSim(self._test.config).run(injected, options=self._options)
        except ScriptError as exc:
            failure = _failure_of(exc)
        return Outcome(failure, self._yields, tuple(unreached), (), ())

    def _with_extra(self, t: Any, extra: tuple[Placed, ...], unreached: list[Placed]) -> Generator[None, None, None]:
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
                break  # The script may wait for something that the event has made impossible.
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


def _spend_failure(t: Any) -> Generator[None, None, None]:
    """A failure that no microbatch of the script met must not meet what the harness does after it."""
    if t.scheduler.failure is None and not t.state.paused:
        t.release_results()
        yield from t.run_until_finished(t.start_req(prompt_len=1, max_new_tokens=1))


def _first_arguments(test: ScriptedTest) -> dict[str, Any]:
    """The first set of values that pytest would parametrize the script with."""
    arguments: dict[str, Any] = {}
    for mark in getattr(test.script, "pytestmark", ()):
        if mark.name == "parametrize":
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            first = getattr(mark.args[1][0], "values", mark.args[1][0])
            arguments |= dict(zip(names, first if isinstance(first, tuple | list) else [first], strict=True))
    return arguments


def _starts_of(t: Any) -> list[StartRequest]:
    events = [event for record in t.history for event in record.events if isinstance(event, Generate)]
    return [StartRequest(rid=event.rid, prompt=len(event.prompt_ids), priority=event.priority) for event in events]


def _do(t: Any, action: Action) -> bool:
    """Call the verb of an action; False when there was nothing to act on, or the engine refused it."""
    try:
        return action.perform(t)
    except Exception as exc:
        if isinstance(exc, IntegrityError):
            raise
        return False


def _failure_of(exc: ScriptError) -> Failure:
    report = exc.report
    kind, _, text = report.error.partition(": ")
    return Failure(kind, text or report.error, len(report.records), f"{type(exc).__name__}: {kind}")
