"""Runs one schedule to its verdict, and many schedules with a common prefix from copies of one run.

A failure is a broken promise, or an exception of the adapter in a step; any other exception is a harness defect.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final

import msgspec

from scripted.core.action import Action
from scripted.core.errors import Overdue
from scripted.core.installed import harness_packages
from scripted.core.phrases import path_of, text_of
from scripted.core.placed_action import Placed
from scripted.core.protocol import ChecksRecords, CopiesRuns, Freezer, SkipsChecks, violations_of
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.run import Cell, Phase, Run
from scripted.core.schedule import Schedule
from scripted.core.states import UnreadableState
from scripted.core.violation import Violation, is_raised_in
from scripted.script import watchdog as watching
from scripted.search.strategies import Drawn, extras_of

_SIGNATURE_LENGTH: Final = 60
# A run takes milliseconds; a longer one is in an endless loop or waits forever.
RUN_TIMEOUT_S: Final = 10.0
# Additions without effect this often are not compared again.
_LOOKS_IN_VAIN: Final = 3
# A run with more additions hardly ever rejoins its base.
_REJOINING_EVENTS: Final = 3
# Copying a run costs as much as this many steps.
_WALKED_STEPS: Final = 16
# The median workload runs this many steps after its last action.
_USUAL_REST_STEPS: Final = 8
_NOT_DETERMINISTIC: Final = "its machine is not deterministic; look for time, random numbers and the order of sets"
OVERDUE: Final = "does not return from {name}: it was there after {:g} s"


class Failure(msgspec.Struct, frozen=True):
    """The failure of a run: the exception's type and text, and its step.

    ``place`` is the file and line at which a scheduler raised, in its step or in a check; empty for a broken promise.
    Two failures of one invariant have equal signatures: ``signature`` leaves out numbers and names, and the machine
    of a fleet that broke it. An exception without a text has its line's.
    """

    type: str
    text: str
    step: int
    signature: str
    place: str = ""

    @classmethod
    def of(cls, exc: Exception, gate: Run) -> Failure:
        """Describe the exception that ended a run."""
        rids = sorted(set(gate.oracle.names), key=len, reverse=True)
        names = "".join(rf"|(?<![\w-]){re.escape(rid)}(?![\w-])" for rid in rids)
        origin = (exc.inner or exc) if isinstance(exc, Violation) else exc
        last = traceback.extract_tb(origin.__traceback__)[-1]
        text = text_of(exc) or last.line or ""
        said = text_of(origin) or text
        # Words of one letter are left out: they are request names or the article.
        words = re.sub(rf"\d+|'[^']*'|\[.*\]{names}|\b[A-Za-z]\b", "#", said.partition(":")[0])
        signature = f"{type(exc).__name__} in {last.name}: {words[:_SIGNATURE_LENGTH]}"
        raised = not isinstance(exc, Violation) and _is_of_scheduler(exc, gate)
        place = f"{path_of(last.filename)}:{last.lineno}, in {last.name}" if raised else ""
        return cls(type(exc).__name__, text, gate.step, signature, place)

    @classmethod
    def of_hang(cls, exc: Overdue, gate: Run | None) -> Failure | None:
        """Describe a run that does not return from the scheduler's code; None if it hangs in the harness's.

        The signature names no function: a loop is interrupted in any of its functions.
        """
        at = [one for one in traceback.walk_tb(exc.__traceback__) if one[0].f_code.co_filename != watching.__file__]
        at.reverse()
        found = _of_scheduler(frame for frame, _ in at)
        if found is None and (gate is None or gate.phase is not Phase.ADAPTER):
            return None
        frame, line = next((one for one in at if one[0] is found), at[0])
        doing = _doing(gate)
        place = f"{path_of(frame.f_code.co_filename)}:{line}, in {frame.f_code.co_name}"
        step = 0 if gate is None else gate.step
        return cls(type(exc).__name__, f"{text_of(exc)}, {doing}", step, f"{type(exc).__name__}, {doing}", place)

    @property
    def hangs(self) -> bool:
        """Return whether the failure is a run that did not end."""
        return self.type == Overdue.__name__

    def __str__(self) -> str:
        return f"step {self.step}: {self.type}: {self.text}" + (f" ({self.place})" if self.place else "")


def _is_of_scheduler(exc: Exception, gate: Run) -> bool:
    return gate.phase is Phase.ADAPTER or is_raised_in(exc, gate.adapter.packages)


def _of_scheduler(frames: Iterable[FrameType]) -> FrameType | None:
    """Return the innermost frame outside Python's library; None if it is the harness's."""
    for frame in frames:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names:
            return None if package in harness_packages() else frame
    return None


def _stack(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _doing(gate: Run | None) -> str:
    return "making or copying a run" if gate is None else gate.phase.value


class Outcome(msgspec.Struct, frozen=True):
    """The end of a run; without ``failure`` every check held."""

    failure: Failure | None
    steps: int
    unreached: tuple[Placed, ...]
    implied: tuple[Placed, ...]
    cells: tuple[Cell, ...]


class Left(Exception):
    """Raised by a watcher to leave a run: the rest is known, or another run continues it."""


def execute(schedule: Schedule, *, timeout_s: float | None = None, leave_out: bool = False) -> Outcome:
    """Run a schedule from its beginning; ``leave_out`` skips the checks that only some runs of a search make.

    Raises HarnessError.
    """

    def begin() -> Run:
        gate = Run(schedule)
        if leave_out and isinstance(adapter := gate.adapter, SkipsChecks):
            adapter.leave_out(gate)
        return gate

    return _finish(begin, timeout_s)[0]


def record(
    schedule: Schedule, *, timeout_s: float | None = None, watch: Callable[[Run], None] | None = None
) -> tuple[Outcome, list[Any]]:
    """Run a schedule and keep every step, the fatal one included; also make the checks that need records.

    Raises HarnessError.
    """
    outcome, gate = _finish(lambda: Run(schedule, record=True, watch=watch), timeout_s)
    if gate is None:
        return outcome, []
    assert gate.records is not None
    if outcome.failure is None and isinstance(adapter := gate.adapter, ChecksRecords):
        try:
            adapter.check_records(gate.records)
        except Violation as exc:
            outcome = msgspec.structs.replace(outcome, failure=Failure.of(exc, gate))
    return outcome, gate.records


def finish(gate: Run, *, timeout_s: float | None = None) -> Outcome:
    """Run a gate to its end. Raises HarnessError for exceptions other than violations and the scheduler's.

    Scheduler code that does not return in time is a failure too.
    """
    return _finish(lambda: gate, timeout_s)[0]


def _finish(begin: Callable[[], Run], timeout_s: float | None) -> tuple[Outcome, Run | None]:
    """Make or copy a run, and run it to its end; return no run if the scheduler raises while it is made."""
    gate: Run | None = None

    def is_owner(frame: FrameType | None) -> bool:
        return (gate is not None and gate.phase is Phase.ADAPTER) or _of_scheduler(_stack(frame)) is not None

    failure = None
    try:
        with watching.watchdog(timeout_s or RUN_TIMEOUT_S, OVERDUE, is_busy=True, is_owner=is_owner):
            gate = begin()
            gate.adapter.drive(gate)
        _check_ended(gate)
    except (HarnessError, Left, ScriptDefinitionError):
        raise
    except Overdue as exc:
        failure = Failure.of_hang(exc, gate)
        if failure is None:
            raise _harness_error(exc, gate) from exc
    except Exception as exc:
        if gate is None:
            raise
        if not (isinstance(exc, (Violation, *violations_of(gate.adapter))) or _is_of_scheduler(exc, gate)):
            raise _harness_error(exc, gate) from exc
        failure = Failure.of(exc, gate)
    if gate is None:
        return Outcome(failure, 0, (), (), ()), None
    return Outcome(failure, gate.step, tuple(gate.unreached), tuple(gate.implied), tuple(gate.cells)), gate


def _harness_error(exc: Exception, gate: Run | None) -> HarnessError:
    step = "" if gate is None else f" {gate.step}"
    return HarnessError(
        f"{_doing(gate)}{step} failed with {type(exc).__name__}: {text_of(exc)}; this says nothing "
        "about the scheduler, and is a defect of the harness or of the adapter"
    )


def _check_ended(gate: Run) -> None:
    """Check that the loop ran until the gate had judged the end. Raises Violation."""
    if gate.phase is not Phase.ORACLE:
        raise Violation(f"the loop ended in step {gate.step}, before the end of the run")


def execute_recorded(
    schedule: Schedule, *, timeout_s: float | None = None, watch: Callable[[Run], None] | None = None
) -> Outcome:
    """Run a schedule with the checks that need records, which the runs of a search do not keep."""
    return record(schedule, timeout_s=timeout_s, watch=watch)[0]


class Prefixes:
    """A base schedule and copies of its run before some steps: a schedule with additions starts at the last such copy.

    A copy is made where runs have walked as many steps as it costs. A run that rejoins the base ends there: its whole
    state equals the base's before the same step, and no addition is left; ``rejoined`` counts these runs. ``steps``
    ends with the first step in which the base had to be settled, because later additions would come before it. If runs
    cannot be copied, every schedule starts at the beginning. With ``is_thorough`` the base is judged by its records and
    must repeat its steps; otherwise it runs when its ``outcome`` is read. With ``is_restored`` the other runs are
    restored from a checkpoint. Raises HarnessError.
    """

    def __init__(
        self, base: Schedule, *, is_thorough: bool = True, is_copied: bool = True, is_restored: bool = False
    ) -> None:
        self.base = base
        self._is_restored = is_restored
        self.rejoined = 0
        adapter = base.adapter
        self._copies_runs = adapter if isinstance(adapter, CopiesRuns) else None
        self._is_readable = is_copied and self._copies_runs is not None
        # By the next step; if there are any, one precedes the first step.
        self._copies: dict[int, Freezer] = {}
        self._walked: Counter[int] = Counter()
        # Before each step: the outline of the state, and the number of the base's records.
        self._passed: list[tuple[object, int, int]] = []
        # Before each step: the control actions that add nothing there.
        self._indistinct: list[tuple[Action, ...]] = []
        self._controls = [action for action in extras_of(base) if action.is_control] if is_copied else []
        self._controlled = {placed.step for placed in base.placed if placed.action.is_control}
        # Runs with the base's outline before each step; and failed comparisons, by additions.
        self._alike: Counter[int] = Counter()
        self._in_vain: Counter[tuple[str, ...]] = Counter()
        self._digests: dict[int, tuple[bytes | None, ...]] = {}
        self._outcome: Outcome | None = None
        if is_thorough:
            self._outcome = execute_recorded(base, watch=self._note)
        elif is_copied:
            self._outcome, _ = _finish(lambda: self._unrecorded(watch=self._note), None)
        else:
            return
        if self.outcome.failure is not None and self.outcome.failure.hangs:
            return
        with contextlib.suppress(Left):
            # The run is left, unless the machine cannot be copied.
            if is_copied:
                self._outcome, _ = _finish(lambda: Run(base, watch=self._leave_copied), None)
                return
        if is_thorough and self.outcome.failure is None:
            self._check_determinism()

    def _unrecorded(self, watch: Callable[[Run], None] | None = None) -> Run:
        """Run the base with all checks except those of records, which are not kept."""
        gate = Run(self.base, record=True, watch=watch)
        gate.records = None
        return gate

    def _begun(self) -> Run:
        return self._unrecorded() if self._is_restored else Run(self.base)

    def _check_determinism(self) -> None:
        again = execute(self.base)
        if again.failure is not None:
            self._outcome = again
        elif (again.steps, again.cells) != (self.outcome.steps, self.outcome.cells):
            raise HarnessError(
                f"the schedule {str(self.base)!r} took {again.steps} steps, and then {self.outcome.steps} or others: "
                f"{_NOT_DETERMINISTIC}"
            )

    @property
    def outcome(self) -> Outcome:
        """Return the end of the base without additions."""
        if self._outcome is None:
            self._outcome, _ = _finish(self._begun, None)
        return self._outcome

    @property
    def steps(self) -> int:
        """Return the number of steps of the base, estimated if it has not run."""
        return len(self._passed) or self.base.last_step + _USUAL_REST_STEPS

    def is_distinct(self, step: int, action: Action) -> bool:
        """Return whether an action added before this step has an effect of its own; True if the base does not know."""
        return step > len(self._indistinct) or action not in self._indistinct[step - 1]

    def execute(self, *extra: Placed) -> Outcome:
        """Run the base schedule with these additions. Raises HarnessError."""
        schedule = self.base.with_placed(extra)
        first = min(placed.step for placed in extra)
        if first > self.steps or not self._copies:
            return execute(schedule)
        kinds = None
        if self._is_readable and self.outcome.failure is None and len(extra) <= _REJOINING_EVENTS:
            kinds = tuple([placed.action.kind for placed in extra])
        last = max(placed.step for placed in extra)

        def watch(run: Run) -> None:
            if kinds is None:
                run.watch = None
            elif run.step >= last:
                run.watch = None
                self._compare(run, kinds)

        gate: Run | None = None

        def begin() -> Run:
            nonlocal gate
            gate = self._copied(first, repr(extra))
            gate.follow(schedule)
            gate.watch = watch
            return gate

        try:
            return _finish(begin, None)[0]
        except Left:
            assert gate is not None, "only a watched run can be left"
            self.rejoined += 1
            return self._rejoined(gate)

    def execute_drawn(self, drawn: Drawn) -> Outcome:
        """Run the base schedule and choose each addition in its step. Raises HarnessError."""
        first, last = (drawn.steps[0], drawn.steps[-1]) if drawn.steps else (1, 0)

        def watch(run: Run) -> None:
            if drawn.come(run.step + 1, lambda action: run.met_by(action) if action.reaches(run) else None):
                run.follow(self.base.with_placed(drawn.placed), until=last)
            if run.step + 1 >= last:
                run.watch = None

        def begin() -> Run:
            gate = self._copied(min(first, self.steps), drawn.name) if self._copies else self._begun()
            gate.follow(self.base, until=last)
            gate.watch = watch
            return gate

        return _finish(begin, None)[0]

    def _copied(self, step: int, name: str) -> Run:
        """Return a run of this name, at this step or earlier. Makes a copy where earlier runs had to walk far."""
        near, walked = self._near(step), self._walked[step]
        self._walked[step] += step - near
        if walked > _WALKED_STEPS:
            gate = self._before(step)
            frozen = self._frozen(gate)
            assert frozen is not None, "a run can be copied before its first step, but not later"
            self._copies[step], near = frozen, step
        return self._thawed(near, name)

    def _frozen(self, gate: Run) -> Freezer | None:
        return None if self._copies_runs is None else self._copies_runs.freeze(gate)

    def _digests_of(self, gate: Run) -> Iterator[bytes | None]:
        assert self._copies_runs is not None, "only runs that can be copied are compared"
        return self._copies_runs.digests(gate)

    def _near(self, step: int) -> int:
        return max(one for one in self._copies if one <= step)

    def _thawed(self, step: int, name: str) -> Run:
        gate = self._copies[step].thaw(name)
        assert isinstance(gate, Run)
        return gate

    def _before(self, step: int) -> Run:
        def leave(run: Run) -> None:
            if run.step + 1 == step:
                raise Left

        gate = self._thawed(self._near(step), "")
        gate.watch = leave
        try:
            finish(gate)
        except Left:
            gate.watch = None
            return gate
        raise HarnessError(f"the schedule {str(self.base)!r} no longer reaches its step {step}: {_NOT_DETERMINISTIC}")

    def _note(self, gate: Run) -> None:
        if gate.was_settled:
            gate.watch = None
            return
        outline = _outline(gate) if self._is_readable else None
        self._passed.append((outline, len(gate.cells), len(gate.unreached)))
        # Added after the base's own control actions of a step, it may meet another state than this one.
        controls = () if gate.step + 1 in self._controlled else self._controls
        self._indistinct.append(tuple(action for action in controls if not action.is_distinct(gate)))

    def _leave_copied(self, gate: Run) -> None:
        """Leave the copy before the first step, for a run without records, like the runs that start from it."""
        gate.watch = None
        frozen = self._frozen(gate)
        if frozen is not None:
            self._copies[1] = frozen
        raise Left

    def _compare(self, gate: Run, kinds: tuple[str, ...]) -> None:
        """Leave a run that is the base again after its last event. A comparison costs as much as two steps."""
        if gate.was_settled or gate.step >= self.steps or _outline(gate) != self._passed[gate.step][0]:
            return
        if self._in_vain[kinds] >= _LOOKS_IN_VAIN:
            return
        # Reading the base's state costs a run up to this step, too much for the first run with its outline.
        here = gate.step + 1
        self._alike[here] += 1
        if self._alike[here] == 1 and here - self._near(here) > _WALKED_STEPS:
            return
        self._in_vain[kinds] += 1
        try:
            base = self._digests_before(here)
            if all(one in (None, other) for one, other in zip(self._digests_of(gate), base, strict=True)):
                self._in_vain[kinds] -= 1
                raise Left
        except UnreadableState:
            self._is_readable = False

    def _digests_before(self, step: int) -> tuple[bytes | None, ...]:
        if step not in self._digests:
            gate = self._before(step)
            self._digests[step] = tuple(self._digests_of(gate))
        return self._digests[step]

    def _rejoined(self, gate: Run) -> Outcome:
        """Return the outcome of the rest of the run."""
        _, cells, unreached = self._passed[gate.step]
        base = self.outcome
        return Outcome(
            None,
            base.steps,
            (*gate.unreached, *base.unreached[unreached:]),
            base.implied,
            (*gate.cells, *base.cells[cells:]),
        )


def _outline(gate: Run) -> object:
    """Return a key that equal states share and most others do not; reading a whole state takes longer."""
    live = [(rid, life.computed, len(life.said), life.aborted) for rid, life in gate.oracle.account.live.items()]
    deadline = None if gate.previous is None else gate.previous.deadline
    busy = gate.is_holding, len(gate.results), gate.clock.now(), deadline, gate.obstacle
    return busy, live, dict(gate.machine.counts())
