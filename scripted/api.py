"""The harness as five functions: search, replay, shrink, write a test, run a script.

The commands are thin shells around them. Every function takes the name of an adapter; none prints anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_for, adapter_named
from scripted.core.defects import Defect
from scripted.core.mutant import switched_on
from scripted.core.protocol import WrittenTest
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.report.difference import first_difference
from scripted.report.failure import FailureReport, ScriptError
from scripted.report.rerun import Rerun
from scripted.report.step_log import StepLog
from scripted.report.trace import Trace, TraceError, TraceHeader, is_trace, read_trace
from scripted.reruns import is_recording, rerun
from scripted.script.decorator import spec_of, test_of
from scripted.script.execution import ScriptOutcome
from scripted.script.harness import Harness, default_tiers, servers_of, sims_of
from scripted.script.loader import find_test
from scripted.script.options import ScriptOptions
from scripted.script.scripted_test import ScriptedTest
from scripted.search import shrinking, written_test
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.generated import first_of, generated_schedule
from scripted.search.kinds import Sorter
from scripted.search.shrinking import SHRINK_BUDGET_S, Shrunk
from scripted.search.strategies import StrategyName
from scripted.search.targets import is_one_word, target_named, workload_named
from scripted.search.units import Finding, SearchPlan

_SECONDS_PER_MINUTE: Final = 60.0


def explore(
    target: str | Schedule | None = None,
    *,
    adapter: str = DEFAULT_ADAPTER,
    corpus: bool = False,
    strategy: str | None = None,
    schedules: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    events: int = 1,
    jobs: int = 1,
    ray: str | None = None,
    mutant: str | None = None,
    stop_at_first: bool = False,
    watch: Callable[[SearchReport], None] = lambda _: None,
    sorter: Sorter | None = None,
    fixed: Iterable[Defect] = (),
) -> SearchReport:
    """Search for schedules under which a scheduler breaks a promise; ``report.findings`` has one per promise.

    ``target`` is a workload's name, ``generated:NUMBER``, a schedule, or ``FILE::NAME`` of a script or a Schedule. None
    stands for generated targets, different ones for each ``seed``, or with ``corpus`` for the adapter's workloads.
    ``strategy`` selects the additions: by default random events for generated targets, otherwise one event at every
    step; the exhaustive strategy adds ``events`` at a time. An endless search stops after a minute, unless
    ``schedules`` or ``minutes`` limits it. ``watch`` gets the report as it grows. A ``sorter`` tells kinds of failure
    apart by cause; ``stop_at_first`` then means the first new kind. The search runs with the fixes of the known defects
    ``fixed``, so that nothing hides behind them. Raises ScriptDefinitionError, or the adapter's error for a
    configuration or a mutant.
    """
    plan = _plan_of(
        target, adapter, strategy, corpus=corpus, events=events, minutes=minutes, schedules=schedules, seed=seed
    )
    plan = msgspec.structs.replace(plan, jobs=jobs, ray=ray, mutant=mutant, fixed=tuple(fixed))
    with plan.switched_on():
        pass  # an unknown name is refused before anything runs
    if sorter is None:
        return Campaign(msgspec.structs.replace(plan, stop_at_first=stop_at_first), watch).run()
    return _sorted(plan, watch, sorter, stop_at_first=stop_at_first)


def _plan_of(
    target: str | Schedule | None,
    adapter: str,
    strategy: str | None,
    *,
    corpus: bool,
    events: int,
    minutes: float | None,
    schedules: int | None,
    seed: int,
) -> SearchPlan:
    """Make the plan of a search in one process, without a mutant. Raises the same exceptions as ``explore``."""
    _check_length(minutes, events)
    if target is not None:
        adapter, target = adapter_of(target, adapter), str(target)
        target_named(target, adapter)
    generated = target is None and not corpus
    if generated:
        generated_schedule(0, adapter)
    every = tuple(adapter_named(adapter).workloads) if corpus else ()
    how = _strategy_of(strategy, events, generated=generated)
    return SearchPlan(
        targets=every if target is None else (target,),
        generated_from=first_of(seed),
        strategy=how,
        seed=seed,
        events=events,
        schedules=schedules,
        seconds=_seconds_of(minutes, schedules, is_endless=generated or how is not StrategyName.EXHAUSTIVE),
        adapter=adapter,
    )


def _strategy_of(strategy: str | None, events: int, *, generated: bool) -> StrategyName:
    """Return the strategy of this name, or the default one. Raises ScriptDefinitionError for events that it ignores."""
    how = StrategyName(strategy or (StrategyName.RANDOM if generated else StrategyName.EXHAUSTIVE))
    if events != 1 and how is not StrategyName.EXHAUSTIVE:
        raise ScriptDefinitionError(f"events belongs to the exhaustive strategy, got {events} with {how}; leave it out")
    return how


def _seconds_of(minutes: float | None, schedules: int | None, *, is_endless: bool) -> float | None:
    """Return the time limit: a minute for a search that has no other end."""
    if minutes is not None:
        return minutes * _SECONDS_PER_MINUTE
    return _SECONDS_PER_MINUTE if is_endless and schedules is None else None


def _sorted(
    plan: SearchPlan, watch: Callable[[SearchReport], None], sorter: Sorter, *, stop_at_first: bool
) -> SearchReport:
    """Search and sort the findings into kinds, up to the first new kind or to the end."""
    is_enough = (lambda: bool(sorter.new)) if stop_at_first else (lambda: False)
    report = Campaign(plan, watch, sort=sorter.add, is_enough=is_enough).run()
    with plan.switched_on():
        sorter.finish()
    return report


def _check_length(minutes: float | None, events: int) -> None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ScriptDefinitionError(
            f"minutes must be more than 0, got {minutes:g}: a search without time finds nothing"
        )
    if events < 1:
        raise ScriptDefinitionError(f"events must be at least 1, got {events}: the exhaustive search adds some")


def replay(
    what: str | Path | Schedule,
    *,
    adapter: str = DEFAULT_ADAPTER,
    until: int | None = None,
    mutant: str | None = None,
    last_steps: int | None = None,
) -> Rerun:
    """Run a schedule's line, a workload or a recording's file again, without model and sockets.

    The returned ``log`` has the steps up to ``until``; for a recording only the ``last_steps`` of them, if given. The
    run in a trace is repeated in its tier and with its mutant, unless another is given; ``differs`` says where the
    repetition diverges. Raises ScriptDefinitionError, or RecordingError or TraceError for a file that cannot be
    replayed.
    """
    line = str(what)
    if not isinstance(what, Schedule) and is_recording(line):
        if is_trace(Path(line)):
            return _replay_trace(Path(line), until, mutant)
        return rerun(line, until=until, mutant=mutant, last_steps=last_steps)
    schedule = _schedule_of(what, adapter)
    if not schedule.placed:
        raise ScriptDefinitionError(f"the schedule {line!r} has no actions, so replaying it shows nothing")
    return rerun(str(schedule), until=until, mutant=mutant)


def _replay_trace(path: Path, until: int | None, mutant: str | None) -> Rerun:
    trace = read_trace(path)
    header, seen = trace.header, trace.log.until(until)
    mutant = mutant or header.mutant
    if header.schedule:
        again = rerun(header.schedule, until=until, mutant=mutant)
    elif header.script:
        run = run_script(header.script, tier=header.tier, arguments=header.arguments, mutant=mutant)
        log = StepLog(seen.stages, seen.depth, ()) if run.trace is None else run.trace.log.until(until)
        error = None if run.error is None else run.error.report.headline
        again = Rerun(log, error, adapter=header.adapter, config=header.config)
    else:
        raise TraceError(
            f"{path} does not say how to repeat it: it comes from a recording, a function or a session; replay the "
            "recording, or keep the trace of a script with `scripted run FILE::NAME --trace FILE`"
        )
    found = first_difference(seen, again.log, exactly=header.tier == "sim")
    if found is None:
        return again
    what = f"step {found.index + 1}, {found.field}: {found.left} in the trace and {found.right} now"
    return msgspec.structs.replace(again, differs=what)


def shrink(
    what: Finding | Schedule | str,
    *,
    adapter: str = DEFAULT_ADAPTER,
    mutant: str | None = None,
    budget_s: float = SHRINK_BUDGET_S,
) -> Shrunk:
    """Reduce a failing schedule to the few events that matter, while the same promise is broken.

    A finding brings its adapter and its mutant. Raises ScriptDefinitionError for a script's finding, which has no
    schedule.
    """
    schedule = _schedule_of(what, adapter)
    signature = what.failure.signature if isinstance(what, Finding) else None
    mutant = what.mutant if isinstance(what, Finding) else mutant
    with switched_on(schedule.adapter, mutant):
        return shrinking.shrink(schedule, signature, budget_s=budget_s)


def write_test(
    what: Finding | Schedule | str | Iterable[Schedule],
    *,
    name: str = "found",
    adapter: str = DEFAULT_ADAPTER,
    mutant: str | None = None,
    standalone: bool = False,
) -> WrittenTest:
    """Write a pytest file for a finding, which is shrunk first, or for the first of several schedules that makes one.

    ``text`` is None if no form of the test is red with the bug and green without; ``said`` says why. A ``standalone``
    test needs only the searched scheduler. Raises ScriptDefinitionError.
    """
    schedules: Iterable[Schedule]
    if isinstance(what, Finding):
        schedules, mutant = (shrink(what).schedule, _schedule_of(what, adapter)), what.mutant
    elif isinstance(what, Schedule | str):
        schedules = [_schedule_of(what, adapter)]
    else:
        schedules = what
    return written_test.write_test(schedules, name=name, mutant=mutant, standalone=standalone)


def _schedule_of(what: Finding | Schedule | str | Path, adapter: str) -> Schedule:
    if isinstance(what, Schedule):
        return what
    if isinstance(what, Finding):
        if (schedule := what.schedule) is None:
            raise ScriptDefinitionError(
                f"{what.target} is a script and not a schedule; add the verbs of these events to it: "
                f"{'; '.join(map(str, what.extra)) or 'none, it fails by itself'}"
            )
        return schedule
    line = str(what)
    return workload_named(line, adapter) if is_one_word(line, adapter) else Schedule.parse(line, of=adapter)


def adapter_of(target: str | Schedule, adapter: str) -> str:
    """Return the adapter of a search of this target: a schedule may name its own."""
    if isinstance(target, Schedule):
        return target.of
    return adapter if "::" in target or is_one_word(target, adapter) else Schedule.parse(target, of=adapter).of


# -- scripts --


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """How a run ended: a success or an error, never both. ``trace`` is None if no step was run."""

    test: ScriptedTest
    tier: str
    success: ScriptOutcome | None
    error: ScriptError | None
    trace: Trace | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the script ended and every check held."""
        return self.error is None

    @property
    def steps(self) -> int:
        """How many steps the script is known to have run."""
        if self.success is not None:
            return self.success.steps
        return len(self.trace.log.steps) if self.trace is not None else 0


def run_script(
    script: str | Callable[..., Any],
    *,
    config: object = None,
    adapter: str | None = None,
    tier: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    mutant: str | None = None,
    every_step: bool | None = None,
    title: str = "",
    replay: str = "",
    harness: Harness[object, ScriptOutcome] | None = None,
) -> RecordedRun:
    """Run one script and keep its every step. A failing script raises nothing here: ``error`` has the report.

    ``script`` is ``FILE::NAME``, a decorated function, or a generator function that takes ``t``, with a ``config``
    whose type selects the adapter unless ``adapter`` names it. ``tier`` defaults to the first that the script names.
    ``every_step`` audits after each step, the default without a ``mutant``. ``harness`` is one that is already started.
    Raises ScriptDefinitionError.
    """
    test = _test_of(script, config, adapter)
    if tier is not None and tier not in test.tiers:
        raise ScriptDefinitionError(f"{title or script} runs in {' and '.join(test.tiers)} only, got --tier {tier}")
    tier = tier or test.tiers[0]
    every_step = mutant is None if every_step is None else every_step
    options = msgspec.structs.replace(test.options, record=True, check_every_step=every_step, replay=replay)
    started = time.perf_counter()
    success: ScriptOutcome | None = None
    error: ScriptError | None = None
    try:
        success = _ended(test, tier, options, arguments or {}, mutant, harness)
    except ScriptError as exc:
        error = exc
    seconds = time.perf_counter() - started
    outcome = "passed" if error is None else error.report.headline
    header = _header_of(test, tier, title=title, outcome=outcome, mutant=mutant)
    if isinstance(script, str):
        header = msgspec.structs.replace(header, script=script, arguments=dict(arguments or {}))
    trace = _trace_of(header, success if error is None else error.report)
    return RecordedRun(test=test, tier=tier, success=success, error=error, trace=trace, seconds=seconds)


def _header_of(test: ScriptedTest, tier: str, *, title: str, outcome: str, mutant: str | None) -> TraceHeader:
    return TraceHeader(
        title=title or test.script.__name__,
        tier=cast("Literal['sim', 'server']", tier),
        adapter=test.adapter,
        config=dict(adapter_named(test.adapter).config_words(test.config)),
        outcome=outcome,
        mutant=mutant,
    )


def _trace_of(header: TraceHeader, ended: ScriptOutcome | FailureReport | None) -> Trace | None:
    """Return the trace of a script that ended or failed; None without a step."""
    if ended is None or ended.log is None or not ended.log.steps:
        return None
    died = ended.log.steps[-1].error is not None
    header = msgspec.structs.replace(header, died=died)
    if isinstance(ended, FailureReport):
        return Trace(header, ended.failed_log or ended.log, ended.notes, ended.failed_fleet)
    return Trace(header, ended.log, ended.notes, ended.fleet)


def _test_of(script: str | Callable[..., Any], config: object, adapter: str | None) -> ScriptedTest:
    if isinstance(script, str):
        return find_test(script)
    if config is None and test_of(script) is not None:
        return spec_of(script)
    if config is None:
        raise ScriptDefinitionError(
            f"{getattr(script, '__name__', script)} is not decorated with @scripted, so it needs a configuration; "
            "give config="
        )
    name = adapter or adapter_for(config)
    tiers = default_tiers(adapter_named(name))
    return ScriptedTest(config=config, adapter=name, tiers=tiers, options=ScriptOptions(), script=script)


def _ended(
    test: ScriptedTest,
    tier: str,
    options: ScriptOptions,
    arguments: Mapping[str, Any],
    mutant: str | None,
    harness: Harness[object, ScriptOutcome] | None,
) -> ScriptOutcome:
    if harness is not None:
        return harness.run(test.script, options=options, **arguments)
    with _start(test, tier, mutant) as started:
        return started.run(test.script, options=options, **arguments)


def _start(test: ScriptedTest, tier: str, mutant: str | None) -> Harness[object, ScriptOutcome]:
    if tier == "server":
        return servers_of(test.adapter).start_server(test.config, mutant=mutant, placement=test.placement)
    return sims_of(test.adapter).start_sim(test.config, mutant=mutant)
