"""What ``scripted replay`` prints and writes: the last steps as a table, the verdict, a trace, a test."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from engine.recording import Recording, RecordingError, read_recording
from scripted.adapters.lockstep.bugs.mutants import switched_on
from scripted.adapters.lockstep.step_words import event_text
from scripted.core.named import OWN
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.replay.as_schedule import translate
from scripted.replay.rerun import Rerun, replay_engine, rerun, rerun_in_fresh_process
from scripted.report.difference import first_difference
from scripted.report.table import step_table
from scripted.report.trace import Trace, TraceHeader, write_trace
from scripted.sdk.recording import is_portable_recording
from scripted.search.console import save_test
from scripted.search.shrinking import shrink

__all__ = ["replay_recording", "replay_schedule"]

_SHOWN_STEPS = 20
# A longer test is not readable.
_SCRIPT_LIMIT_EVENTS = 400


def replay_schedule(
    console: Console,
    text: str,
    *,
    until: int | None,
    mutant: str | None,
    trace: Path | None,
    to_script: Path | None,
    twice: bool,
) -> bool:
    """Run a schedule; True when every promise was kept."""
    schedule = Schedule.parse(text)
    run = rerun(text, until=until, mutant=mutant)
    _show(console, run)
    if trace is not None:
        _write_trace(
            trace, run, schedule.adapter.config_words(schedule.config), title=_title_of(schedule), mutant=mutant
        )
    if to_script is not None and not save_test(console, [schedule], to_script, name="schedule", mutant=mutant):
        return False
    return (not twice or _same_again(console, text, run, until, mutant)) and run.passed


def replay_recording(
    console: Console,
    path: Path,
    *,
    until: int | None,
    mutant: str | None,
    trace: Path | None,
    to_script: Path | None,
    twice: bool,
) -> bool:
    """Replay a recording; True when every step did what it did then."""
    if to_script is not None and is_portable_recording(path):
        raise ScriptDefinitionError(
            f"a test is made of a schedule, and {path} has steps only; find a schedule with `scripted explore`"
        )
    whole = twice or trace is not None or to_script is not None
    begun = time.monotonic()
    try:
        run = rerun(str(path), until=until, mutant=mutant, last_steps=None if whole else _SHOWN_STEPS)
    except RecordingError:
        _show_what_went_in(console, read_recording(path))
        raise
    seconds = time.monotonic() - begun
    _show(console, run)
    if run.recorded_s:
        speed = run.recorded_s / seconds
        console.print(f"{run.recorded_s:.1f} s of an engine's life again in {seconds:.1f} s, {speed:.1f} times as fast")
    if trace is not None:
        _write_trace(trace, run, {}, title=path.name, mutant=mutant)
    if to_script is not None and not _write_script(console, path, until, to_script, mutant):
        return False
    return (not twice or _same_again(console, str(path), run, until, mutant)) and run.passed


def _title_of(schedule: Schedule) -> str:
    """Whose schedule the page shows."""
    return "schedule" if schedule.of == OWN else f"schedule of {schedule.of}"


def _write_script(console: Console, path: Path, until: int | None, to_script: Path, mutant: str | None) -> bool:
    """A recording as a test: of what failed in it, shrunk, where it fails as a schedule too; else of all of it.

    False when no test of it is right.
    """
    recording = read_recording(path)
    steps = recording.steps if until is None else recording.steps[:until]
    with switched_on(mutant):
        records = replay_engine(path, until=until, last_steps=None)[1]
    translation = translate(msgspec.structs.replace(recording, steps=steps), records)
    console.print(
        f"as a schedule: {len(translation.schedule.placed)} events; {translation.same_steps} of {translation.steps} "
        "recorded steps launch the same",
        soft_wrap=True,
    )
    for note in translation.notes:
        console.print(f"not carried: {note}", soft_wrap=True)
    schedule = translation.schedule
    with switched_on(mutant):
        shrunk = shrink(schedule)
    schedules = [schedule]
    if shrunk.runs > 1:
        small = shrunk.schedule
        console.print(f"it fails; shrunk to {len(small.placed)} events in {shrunk.seconds:.1f} s: {small}")
        schedules = [small, *schedules] if len(schedule.placed) <= _SCRIPT_LIMIT_EVENTS else [small]
    elif len(schedule.placed) > _SCRIPT_LIMIT_EVENTS:
        raise RecordingError(
            f"a script has at most {_SCRIPT_LIMIT_EVENTS} events, unless a failure can be shrunk; {path} has "
            f"{len(schedule.placed)} and none of them fails; give --until STEP"
        )
    return save_test(console, schedules, to_script, name=path.stem, mutant=mutant)


def _show_what_went_in(console: Console, recording: Recording) -> None:
    """What is left of a recording that cannot be replayed: plans and replies are in it as check sums only."""
    for step in recording.steps[-_SHOWN_STEPS:]:
        events = ", ".join(event_text(event) for event in step.events) or "nothing"
        console.print(f"step {step.step}, {step.now:.3f} s: {events}", soft_wrap=True, markup=False)
    if recording.end is not None and recording.end.error is not None:
        console.print(f"there it died of {recording.end.error}", soft_wrap=True, markup=False)


def _show(console: Console, run: Rerun) -> None:
    console.print(step_table(run.log, last=_SHOWN_STEPS))
    steps = run.log.steps
    if len(steps) > _SHOWN_STEPS:
        console.print(f"steps {steps[0].step} to {steps[-_SHOWN_STEPS - 1].step} are left out; --trace FILE keeps all")
    for one in run.unreached:
        console.print(f"met nothing to act on: {one}", soft_wrap=True)
    if run.broken is not None:
        console.print(f"BROKEN: {run.broken}", soft_wrap=True)
    if run.differs is not None:
        console.print(f"DIFFERS: {run.differs}", soft_wrap=True)
    elif run.error is not None:
        word = "as recorded, it died of" if run.recorded_error == run.error else "FAILED:"
        console.print(f"{word} {run.error}", soft_wrap=True)
    elif run.recorded_error is not None:
        console.print(f"DIFFERS: the recorded run died of {run.recorded_error}, this one did not", soft_wrap=True)
    if steps:
        last, begun = steps[-1], "" if run.first_step == 1 else f", of those from step {run.first_step} on"
        console.print(f"{last.step} steps, digest {last.digest}{begun}")


def _same_again(console: Console, target: str, run: Rerun, until: int | None, mutant: str | None) -> bool:
    """The determinism self-test: once more here, once in a fresh process."""
    for where, again in (("here", rerun), ("in a fresh process", rerun_in_fresh_process)):
        log = again(target, until=until, mutant=mutant).log
        found = first_difference(run.log, log, exactly=True)
        if found is not None:
            what = f"step {found.index + 1}, {found.field}: {found.left} and {found.right}"
            console.print(f"NOT DETERMINISTIC {where}: {what}", soft_wrap=True)
            return False
    console.print("the same again here and in a fresh process with another hash seed")
    return True


def _write_trace(path: Path, run: Rerun, config: Mapping[str, Any], *, title: str, mutant: str | None) -> None:
    header = TraceHeader(
        title=title,
        config=dict(config),
        outcome=run.differs or run.error or run.broken or "passed",
        mutant=mutant,
        died=run.error is not None and bool(run.log.steps) and run.log.steps[-1].error is not None,
    )
    write_trace(path, Trace(header, run.log))
