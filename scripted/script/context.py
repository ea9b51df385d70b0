"""``t``, the object through which a script drives and observes a scheduler; for every adapter.

Its verbs come from the adapter's actions, so ``t`` can do everything that a schedule of the adapter can. Queries, waits
and windows are here; an adapter's subclass adds queries about its scheduler. ``t`` keeps no scheduler state.
"""

from __future__ import annotations

import functools
import linecache
import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any, ClassVar, Final, TypeVar

from scripted.core.action import Action, verbs_of
from scripted.core.clock import VirtualClock
from scripted.core.errors import BadCall, BudgetSpent
from scripted.core.installed import is_in_harness
from scripted.core.phrases import nearest
from scripted.report.step_log import Note
from scripted.script.clients import Call
from scripted.script.handles import BaseRequest, status_of
from scripted.script.static_checks import Asked, check_count, check_predicate, several, truth_of
from scripted.script.values import Listed, ListedList, Named
from scripted.script.wait import DEFAULT_BUDGET_STEPS, HAND_ON, Steps, Wait, is_timeless


class ScriptClock(Asked):
    _called = "t.clock"

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._seal()

    def now(self) -> float:
        """Return the seconds by which the script has advanced the clock."""
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        """Move time forward; the next step is the first that sees it."""
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(self._clock.now() + seconds) or seconds < 0:
            raise BadCall(f"t.clock.advance() takes seconds >= 0, got {seconds!r}; it is {self._clock.now():g} s")
        self._clock.advance(seconds)

    def __repr__(self) -> str:
        return f"<virtual time: {self._clock.now():g} s>"


_Context = TypeVar("_Context", bound="BaseContext")
# The start of the failure of a script that never saw a window; the names follow.
NEVER_REACHED: Final = "the script never reached"
# The file that resumes scripts: its frames are below the script's in the stack.
_EXECUTION: Final = str(Path(__file__).with_name("execution.py"))
_MOST_LINES: Final = 1000
STAGES: Final = ("first_chunk", "last_chunk", "first_decode", "mid_decode", "last_decode")

# The actions whose verbs a class of ``t`` has.
_actions: Final[dict[type, tuple[type[Action], ...]]] = {}


def with_verbs(actions: Iterable[type[Action]]) -> Callable[[type[_Context]], type[_Context]]:
    """Add the verbs of these actions to a class of ``t`` as methods."""

    def decorate(context: type[_Context]) -> type[_Context]:
        _actions[context] = tuple(actions)
        for action in _actions[context]:
            for name, verb in verbs_of(action).items():
                setattr(context, name, _at_its_line(verb))
        return context

    return decorate


def _at_its_line(verb: Callable[..., object]) -> Callable[..., object]:
    """Wrap a verb so that it notes the script's line that calls it."""

    @functools.wraps(verb)
    def noted(t: BaseContext, *args: object, **kwargs: object) -> object:
        t.note_line()
        return verb(t, *args, **kwargs)

    return noted


def actions_behind(t: BaseContext) -> tuple[type[Action], ...]:
    """Return the actions whose verbs this ``t`` has, in order."""
    return next(_actions[kind] for kind in type(t).__mro__ if kind in _actions)


class BaseContext(Asked):
    """Base class of ``t``. ``reached`` counts how often each window of ``sometimes`` was open.

    Requests without their own rid are named ``<rid_prefix>-<number>``. The script has to see every window in
    ``must_reach``, and if that is not empty it may name no others. Verbs use ``run``, the run that the script drives.
    """

    _loose_end_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, run: Any, *, rid_prefix: str = "scripted", must_reach: Sequence[str] = ()) -> None:
        # None after the script has ended.
        self._driven: Any = run
        self._clock = ScriptClock(run.clock)
        self._rid_prefix = rid_prefix
        self._rids = 0
        self._made: list[Wait] = []
        # The innermost generator that the script has yielded from.
        self._position: object = None
        # Whether each predicate of ``run_until``, by its code, has ever been false.
        self._waited: dict[object, bool] = {}
        self._must_reach = must_reach
        self.reached: dict[str, int] = {}
        self.notes: list[Note] = []
        # The last lines that called verbs: the step that sees the effect, the file, the line.
        self._lines: deque[tuple[int, str, int]] = deque(maxlen=_MOST_LINES)
        self.is_smoke = False
        # Calls without an effect, by name in the summary.
        self._ineffective: dict[str, int] = {}
        # The steps in which the script ordered the next batch to fail.
        self._failures_ordered: list[int] = []
        self._bad_calls_before = BadCall.made
        self._budgets_before = BudgetSpent.made
        self._seal()

    # -- for verbs --

    @property
    def run(self) -> Any:
        """The run that the script drives: for verbs."""
        if self._driven is None:
            raise BadCall("this t belongs to a script that has ended; use the t that the running script was given")
        return self._driven

    def next_rid(self) -> str:
        """Return a rid for a request without its own."""
        self._rids += 1
        return f"{self._rid_prefix}-{self._rids}"

    def check_handle(self, call: str, r: object) -> None:
        """Raise BadCall for anything but a handle of this script."""
        if not isinstance(r, BaseRequest):
            several = "; for several write run_until_all_finished" if isinstance(r, (list, tuple)) else ""
            raise BadCall(f"{call} takes a handle, the value of t.start_req(...), got {r!r}{several}")
        handles = self.run.handles
        if not any(r is known for known in (*handles.all, *handles.several)):
            raise BadCall(f"{call} takes a handle of this script, got {r!r} of another one")

    def rid_of(self, call: str, r: BaseRequest | str) -> str:
        """Return the rid of a handle, or the given rid. Counts a rid that never existed as ineffective."""
        if not isinstance(r, str):
            self.check_handle(call, r)
        rid = r if isinstance(r, str) else r.rid
        if rid not in self.run.handles.known_rids():
            self.count_ineffective("aborts of rids that never were")
        return rid

    def check_released(self, call: str, n: object) -> None:
        """Raise BadCall for anything but a number of held things, or None for all of them."""
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise BadCall(f"{call} takes n >= 1, or None for all, got {n!r}")

    def count_ineffective(self, what: str) -> None:
        """Count a call without an effect, for the summary."""
        self._ineffective[what] = self._ineffective.get(what, 0) + 1

    def note_line(self) -> None:
        """Note the current line of code outside the harness, whose verb acts on the next step."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None and is_in_harness(frame.f_code.co_filename):
            frame = None if frame.f_code.co_filename == _EXECUTION else frame.f_back
        # Code typed into a shell or passed to eval has no file.
        if frame is not None and not frame.f_code.co_filename.startswith("<"):
            self._lines.append((self.run.step + 1, frame.f_code.co_filename, frame.f_lineno))

    def note_failure(self) -> None:
        """Note that the next batch will fail, so that a failure that meets no batch is counted."""
        self._failures_ordered.append(self.run.step)

    # -- queries --

    @property
    def scheduler(self) -> Any:
        """The live scheduler, which a script may inspect without limits."""
        return self.run.scheduler

    @property
    def clock(self) -> ScriptClock:
        """Virtual time; only ``clock.advance(seconds)`` moves it."""
        return self._clock

    @property
    def state(self) -> Any:
        """A frozen snapshot of the scheduler as it is now."""
        return self.run.take_state()

    @property
    def history(self) -> tuple[object, ...]:
        """Every step of this script so far."""
        return Listed(self.run.records)

    @property
    def is_fully_idle(self) -> bool:
        """True when nothing is in flight, owns memory or waits, and a step has seen every arrival."""
        return bool(self.run.is_fully_idle)

    @property
    def forward_ct(self) -> int:
        """Microbatches launched since the script began."""
        return int(self.run.launches)

    @property
    def last_batch_forward_mode(self) -> str | None:
        """The mode of the last launched microbatch: ``prefill``, ``decode`` or ``mixed``.

        None before the first launch, and after the step that took the last launch's results.
        """
        last = self.run.last_batch()
        return None if last is None else last.mode

    def find_req_by_rid(self, rid: str) -> Any:
        """Return the scheduler's live object for a rid; None before its first step, after its end, or if unknown."""
        handle = self._last_life("find_req_by_rid", rid)
        return None if handle is None else handle.req

    def is_finished(self, rid: str) -> bool:
        """Return whether the last request with this rid has ended. Raises BadCall for a rid that never existed."""
        return bool(self._known("is_finished", rid).finished)

    def is_chunking(self, rid: str) -> bool:
        """Return whether this is the partly prefilled request. Raises BadCall for a rid that never existed."""
        return bool(self._known("is_chunking", rid).is_chunking)

    def status(self, rid: str) -> str:
        """Return ``waiting``, ``running``, ``finished``, ``aborted``, or ``unknown`` for a rid that never existed."""
        handle = self._last_life("status", rid)
        return status_of("unknown") if handle is None else handle.status

    def list_active_reqs(self) -> Sequence[object]:
        """Return the scheduler's live objects for requests that have not ended; an arrival has none yet."""
        return ListedList(handle.req for handle in self.run.handles.live().values() if handle.req is not None)

    def batch_composition(self) -> dict[str, list[str]]:
        """Return rids by role: ``prefill`` and ``decode`` in the last microbatch, ``chunked``, ``running``.

        The last microbatch counts while it is in flight and in the step that takes its results. ``prefill`` leaves out
        the partly prefilled request, which is under ``chunked``, so that the first three are disjoint.
        """
        state, last = self.state, self.run.last_batch()
        chunked = [] if state.chunked is None else [state.chunked]
        rids = [] if last is None else [rid for rid in last.rids if rid not in chunked]
        decoding = set(rids) & self.run.decoding_in(last) if last is not None else set()
        parts: dict[str, list[str]] = {
            "prefill": ListedList(rid for rid in rids if rid not in decoding),
            "decode": ListedList(rid for rid in rids if rid in decoding),
            "chunked": ListedList(chunked),
            "running": ListedList(state.running),
        }
        return Named("t.batch_composition()", parts)

    # -- waiting --

    def run_until(self, predicate: Callable[[], object], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until ``predicate()`` is true; no step if it is true already."""
        check_predicate(predicate)
        check_count("run_until()", "max_steps", max_steps)
        code = getattr(predicate, "__code__", None)
        self._waited.setdefault(code, False)
        return self._waiting(
            "run_until(...)",
            lambda: self._noted(code, truth_of(predicate(), "the predicate's answer")),
            max_steps,
            "the predicate never held",
            needs_change=is_timeless(predicate),
        )

    def _noted(self, code: object, holds: bool) -> bool:
        self._waited[code] = self._waited[code] or not holds
        return holds

    def run_until_finished(self, r: BaseRequest, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the request has ended, for any reason."""
        self._check_wait("run_until_finished()", r, max_steps)
        return self._waiting(f"run_until_finished({r.rid})", lambda: r.finished, max_steps, f"{r.rid} did not finish")

    def run_until_all_finished(self, rs: Iterable[BaseRequest], max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until every one of these requests has ended."""
        handles = several(rs, BaseRequest)
        for r in handles:
            self._check_wait("run_until_all_finished()", r, max_steps)
        done = lambda: all(r.finished for r in handles)  # noqa: E731
        return self._waiting("run_until_all_finished(...)", done, max_steps, f"not all of {handles} finished")

    def run_until_idle(self, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the scheduler is fully idle; arrivals that no step has seen count as work."""
        check_count("run_until_idle()", "max_steps", max_steps)
        return self._waiting(
            "run_until_idle()", lambda: self.is_fully_idle, max_steps, "the scheduler did not get idle"
        )

    def advance_to_nth_chunk(self, r: BaseRequest, n: int, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until ``n`` chunks of the request's prompt have been launched."""
        self._check_wait("advance_to_nth_chunk()", r, max_steps)
        check_count("advance_to_nth_chunk()", "n", n)
        what, goal = f"advance_to_nth_chunk({r.rid}, {n})", f"{r.rid} never got to chunk {n}"
        return self._waiting(what, lambda: r.chunks_done >= n, max_steps, goal, r, needs_chunks=True)

    def advance_to_decode_step(self, r: BaseRequest, n: int, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the scheduler has emitted ``n`` tokens for the request."""
        self._check_wait("advance_to_decode_step()", r, max_steps)
        check_count("advance_to_decode_step()", "n", n)
        what, goal = f"advance_to_decode_step({r.rid}, {n})", f"{r.rid} never got to {n} tokens"
        return self._waiting(what, lambda: len(r.output_ids) >= n, max_steps, goal, r)

    def advance_to_stage(self, r: BaseRequest, stage: str, max_steps: int = DEFAULT_BUDGET_STEPS) -> Wait:
        """Run steps until the request reaches a named stage of its life.

        ``first_chunk``: a part of its prompt has been launched; ``last_chunk``: all of it, and no token emitted yet;
        ``first_decode``, ``mid_decode``, ``last_decode``: one, half and all but one of its tokens have been emitted.
        """
        self._check_wait("advance_to_stage()", r, max_steps)
        reached: dict[str, Callable[[], bool]] = {
            "first_chunk": lambda: r.chunks_done >= 1,
            "last_chunk": lambda: r.is_prefilled,
            "first_decode": lambda: len(r.output_ids) >= 1,
            "mid_decode": lambda: len(r.output_ids) >= max(1, r.max_new_tokens // 2),
            "last_decode": lambda: len(r.output_ids) >= max(1, r.max_new_tokens - 1),
        }
        if not isinstance(stage, str) or stage not in reached:
            guess = nearest(str(stage), STAGES)
            raise BadCall(f"advance_to_stage() takes one of {', '.join(STAGES)}, got {stage!r}{guess}")
        what, goal = f"advance_to_stage({r.rid}, {stage})", f"{r.rid} never got to {stage}"
        return self._waiting(what, reached[stage], max_steps, goal, r, needs_chunks=stage == "first_chunk")

    def smoke(self) -> None:
        """Declare a script without assertions: it only has to end, under the harness's own checks."""
        self.is_smoke = True

    def sometimes(self, name: str, condition: object) -> bool:
        """Record whether a window was open. With ``must_reach=[name]`` a script that never saw it open fails."""
        if not name or not isinstance(name, str):
            raise BadCall(f"sometimes() takes a name that is not empty, got {name!r}")
        if self._must_reach and name not in self._must_reach:
            raise BadCall(
                f"sometimes() names {name!r}, which is not in must_reach{nearest(name, self._must_reach)}; "
                "add it there, so that a run that never sees it fails"
            )
        holds = truth_of(condition, f"the condition of {name!r}")
        if holds and not self.reached.get(name):
            self.notes.append(Note(self.run.step, name))
        self.reached[name] = self.reached.get(name, 0) + holds
        return holds

    # -- for the run --

    def wait_for(self, what: str, generator: Steps) -> Wait:
        """Make a wait, to be run with ``yield from``; for verbs."""
        wait = Wait(what, generator)
        self._made.append(wait)
        return wait

    def line_notes(self) -> list[Note]:
        """Return the script's lines that called verbs, each once per step."""
        lines = dict.fromkeys(self._lines)
        return [Note(step, linecache.getline(file, line).strip(), file, line) for step, file, line in lines]

    def _note_position(self, script: Generator[object, Any, object] | None) -> None:
        """Note the wait that the script is in: during a ``yield from``, none of the script's own lines run."""
        at: Any = script
        while isinstance(at, GeneratorType) and at.gi_yieldfrom is not None:
            at = at.gi_yieldfrom
        self._position = at

    def check_waits(self) -> None:
        """Raise BadCall for a wait that was created but never run with ``yield from``, and so did nothing."""
        forgotten = next((wait for wait in self._made if not wait.used), None)
        self._made.clear()
        if forgotten is not None:
            raise BadCall(f"t.{forgotten.what} did nothing: write 'yield from t.{forgotten.what}'")

    def check_reached(self) -> None:
        """Raise AssertionError, as the script itself would, for windows of ``must_reach`` that were never open."""
        if missed := [name for name in self._must_reach if not self.reached.get(name)]:
            raise AssertionError(f"{NEVER_REACHED} {', '.join(map(repr, missed))}; reached: {self.reached}")

    def loose_ends(self) -> dict[str, int]:
        """Count, by name, what the script left behind that may be a mistake; only counts above zero."""
        run = self.run
        calls: Sequence[Call] = run.handles.calls
        idle = bool(run.records) and not any(map(run.did_something, run.records))
        counts = {
            "requests alive at the end": sum(not handle.finished for handle in run.handles.all if not run.is_dead),
            "calls without an answer at the end": sum(not call.done for call in calls),
            "answers never looked at": sum(call.done and call.must_be_read and not call.was_read for call in calls),
            "windows not in must_reach": 0 if self._must_reach else len(self.reached),
            "failures of a stage that no step met": self._failures_not_met(),
            "waits that were over at once": sum(not waited for waited in self._waited.values()),
            "bad calls that the script caught": BadCall.made - self._bad_calls_before,
            "spent budgets that the script caught": BudgetSpent.made - self._budgets_before,
            "scripts without a step": not run.records,
            "scripts in which no step had anything to do": idle,
        }
        return {name: int(count) for name, count in (counts | self._ineffective).items() if count}

    def end(self) -> None:
        """Mark the script as ended: from now on ``t`` refuses everything but ``reached`` and ``notes``."""
        self._driven = None

    # -- private --

    def _failures_not_met(self) -> int:
        """Count the orders to fail after which nothing was launched and nothing failed."""
        fails = [step for step, record in enumerate(self.run.records, 1) if self.run.can_fail(record)]
        return sum(not any(step > ordered for step in fails) for ordered in self._failures_ordered)

    def _last_life(self, query: str, rid: str) -> Any:
        """Return the handle of a rid's last request; count a rid that never existed as ineffective."""
        if not isinstance(rid, str):
            raise BadCall(f"t.{query}() takes a rid, got {rid!r}; write .rid after it, or ask the handle itself")
        handle = self.run.handles.latest(rid)
        if handle is None:
            self.count_ineffective("questions about rids that never were")
        return handle

    def _known(self, query: str, rid: str) -> Any:
        handle = self._last_life(query, rid)
        if handle is None:
            known = self.run.handles.known_rids()
            raise BadCall(
                f"t.{query}({rid!r}) asks about a rid that never was{nearest(rid, known)}; "
                f"the script has started {', '.join(sorted(known)) or 'none'}, and t.status(rid) says 'unknown'"
            )
        return handle

    def _check_wait(self, call: str, r: object, max_steps: object) -> None:
        self.check_handle(call, r)
        if isinstance(max_steps, BaseRequest):
            raise BadCall(f"{call} takes one request, got a second one; run_until_all_finished([r, s]) takes several")
        check_count(call, "max_steps", max_steps)

    def _waiting(
        self,
        what: str,
        reached: Callable[[], object],
        max_steps: int,
        goal: str,
        r: BaseRequest | None = None,
        *,
        needs_chunks: bool = False,
        needs_change: bool = False,
    ) -> Wait:
        """Make a wait until ``reached()`` holds. A wait for request ``r`` fails once ``r`` ends.

        With ``needs_change`` it also fails once the scheduler is at rest, since the goal is then out of reach.
        """

        def until() -> Steps:
            first_step = self.run.step
            for _ in range(max_steps):
                if reached():
                    return
                if r is not None and r.finished:
                    whole = needs_chunks and not r.chunks_done
                    why = ", and a prompt that is not split counts no chunks" if whole else ""
                    raise BudgetSpent(f"{goal}: it ended before ({r.finish_reason}){why}; {self.state}")
                if needs_change and self.run.step > first_step and self._position is made and self.run.is_at_rest:
                    raise BudgetSpent(f"{goal}: {self.run.idle_words}; {self.state}")
                yield
            if not reached():
                raise self._spent(goal, max_steps, first_step)

        made = until()
        return self.wait_for(what, made)

    def _spent(self, goal: str, max_steps: int, first_step: int) -> BudgetSpent:
        """Make the error of a wait: its goal, the state, known obstacles and the remedy."""
        if self.run.step == first_step:
            return BudgetSpent(f"{goal}, because no step ran between its questions; {self.state}; {HAND_ON}")
        causes = "; ".join(self.run.causes())
        why = f"because {causes}" if causes else "and nothing is known to stand in its way; max_steps=N allows more"
        return BudgetSpent(f"{goal} within {max_steps} steps; {self.state}; {why}")
