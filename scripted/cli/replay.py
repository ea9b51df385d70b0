"""``scripted replay``: the last steps as a table, the verdict, a trace, a test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console

from lockstep.errors import LockstepError, visible
from lockstep.output_files import require_writable
from scripted.cli.console import ADAPTER_OPTION, STANDALONE_OPTION, plain_console, save_test
from scripted.cli.fixes import FIX_KNOWN_OPTION, fixes_for
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.defects import DEFAULT_KNOWN, Defect, all_fixed
from scripted.core.refusals import ScriptDefinitionError

if TYPE_CHECKING:
    from scripted.core.schedule import Schedule
    from scripted.report.rerun import Rerun
    from scripted.report.trace import TraceHeader

EXIT_FAILED = 1
# `git bisect run` skips such a commit.
EXIT_UNKNOWN = 125
_SHOWN_STEPS = 20
# Longer tests are unreadable.
_SCRIPT_LIMIT_EVENTS = 400

_What: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCHEDULE|RECORDING|TRACE", help="a schedule's line, or a file")
]
_Until: TypeAlias = Annotated[int | None, typer.Option(min=1, metavar="STEP", help="stop after this step")]
_Mutant: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="switch on a bug of the gallery")]
_TraceFile: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="write the steps for `scripted view`")]
_ToScript: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="write it as a test")]
_Twice: TypeAlias = Annotated[
    bool, typer.Option(help="run it again, here and in a fresh process with another hash seed, and compare")
]
_Bisect: TypeAlias = Annotated[
    bool, typer.Option(help="for `git bisect run`: exit status 0 if no promise breaks, 1 if one does, 125 if unknown")
]


def replay(
    what: _What,
    until: _Until = None,
    mutant: _Mutant = None,
    trace: _TraceFile = None,
    to_script: _ToScript = None,
    standalone: Annotated[bool, STANDALONE_OPTION] = False,
    twice: _Twice = False,
    bisect: _Bisect = False,
    fix_known: Annotated[bool, FIX_KNOWN_OPTION] = False,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Run a schedule, a recording or a trace again.

    No model and no sockets are needed, except for a trace from a server. The exit status is 1 if a check fails, or if
    the run differs from its recording.
    """
    fixed: tuple[Defect, ...] = ()
    if fix_known:
        given = {
            "--twice": twice,
            "--to-script": to_script is not None,
            "--bisect": bisect,
            "a file": _is_recorded(what),
        }
        fixed = fixes_for(_adapter_in(what, adapter), DEFAULT_KNOWN, given)
    if bisect:
        raise typer.Exit(_bisected(what, adapter, until))
    require_writable("--trace", trace)
    require_writable("--to-script", to_script)
    console, traced = plain_console(), _trace_in(what)
    if traced is not None and (twice or to_script is not None):
        _check_no_script(what, traced)
    recorded = _is_recorded(what) and traced is None
    whole = twice or trace is not None or to_script is not None or not recorded
    with all_fixed(fixed):
        run, seconds = _run_again(console, what, adapter, until, mutant, last_steps=None if whole else _SHOWN_STEPS)
    _show(console, run)
    if run.schedule and not recorded:
        _show_server_lines(console, run.schedule)
    _show_comparison(console, run, what, seconds, is_traced=traced is not None)
    if trace is not None:
        _write_trace(trace, run, Path(what).name if recorded else f"schedule of {run.adapter}", mutant)
    recording = Path(what) if recorded else None
    is_written = to_script is None or _write_test(console, run, recording, to_script, until, mutant, standalone)
    target = what if recorded else run.schedule
    is_repeated = not (is_written and twice) or _same_again(console, target, run, until, mutant)
    if not (is_written and is_repeated and run.passed):
        raise typer.Exit(EXIT_FAILED)


def _adapter_in(what: str, adapter: str) -> str:
    from scripted import api

    return adapter if _is_recorded(what) else api.adapter_of(what, adapter)


def _is_recorded(what: str) -> bool:
    from scripted.reruns import is_recording

    return is_recording(what)


def _trace_in(what: str) -> TraceHeader | None:
    """Return the header of a trace; None for a schedule or a recording."""
    from scripted.report.trace import is_trace, read_trace

    return read_trace(what).header if _is_recorded(what) and is_trace(Path(what)) else None


def _run_again(
    console: Console, what: str, adapter: str, until: int | None, mutant: str | None, *, last_steps: int | None
) -> tuple[Rerun, float]:
    """Run it and return the seconds that took. Prints an error's notes before raising it."""
    from scripted import api

    begun = time.monotonic()
    try:
        run = api.replay(what, adapter=adapter, until=until, mutant=mutant, last_steps=last_steps)
    except LockstepError as exc:
        for line in getattr(exc, "__notes__", ()):
            console.print(line, soft_wrap=True)
        raise
    return run, time.monotonic() - begun


def _show_server_lines(console: Console, schedule: str) -> None:
    """Print the server settings that a schedule stands for."""
    from scripted.cli.reach import server_lines
    from scripted.core.schedule import Schedule

    for line in server_lines(Schedule.parse(schedule)):
        console.print(line, soft_wrap=True)


def _write_trace(file: Path, run: Rerun, title: str, mutant: str | None) -> None:
    from scripted.report.trace import write_trace

    write_trace(file, run.trace(title, mutant))


def _write_test(
    console: Console,
    run: Rerun,
    recording: Path | None,
    to_script: Path,
    until: int | None,
    mutant: str | None,
    standalone: bool,
) -> bool:
    """Write a recording or the run's schedule as a test. Returns False if no correct test of it exists."""
    from scripted.core.schedule import Schedule

    if recording is not None:
        return _write_script(console, recording, until, to_script, mutant, standalone)
    schedule = Schedule.parse(run.schedule)
    return save_test(console, [schedule], to_script, name="schedule", mutant=mutant, standalone=standalone)


def _check_no_script(what: str, traced: TraceHeader) -> None:
    """Refuse to repeat or write a script's trace. Raises ScriptDefinitionError."""
    if traced.script:
        raise ScriptDefinitionError(
            f"{what} is a trace of {traced.script}, which is a test already and is compared with the trace; leave out "
            "--twice and --to-script"
        )


def _show_comparison(console: Console, run: Rerun, what: str, seconds: float, *, is_traced: bool) -> None:
    """Print how fast a recording was replayed, and whether the steps equal a trace's."""
    if run.recorded_s:
        speed = run.recorded_s / seconds
        times = f"{speed:.1f}" if speed >= 1 else f"{speed:.2g}"
        console.print(f"{run.recorded_s:.1f} s of an engine's life again in {seconds:.1f} s, {times} times as fast")
    if is_traced and run.differs is None:
        console.print(f"the same {len(run.log.steps)} steps as in {what}", soft_wrap=True)


def _bisected(what: str, adapter: str, until: int | None) -> int:
    """Print in one line whether a promise breaks here, even if the plans differ; return the exit status."""
    from scripted import api

    console = plain_console()
    try:
        run = api.replay(what, adapter=adapter, until=until, last_steps=1)
    except (LockstepError, ScriptDefinitionError, ImportError) as exc:
        console.print(f"unknown: {exc}", soft_wrap=True)
        return EXIT_UNKNOWN
    left = "" if run.differs is None else f"; plans differ from {run.differs.partition(':')[0]} on"
    broken = run.broken or run.error
    console.print(f"{'no promise breaks' if broken is None else f'BROKEN: {broken}'}{left}", soft_wrap=True)
    return 0 if broken is None else EXIT_FAILED


def _write_script(
    console: Console, path: Path, until: int | None, to_script: Path, mutant: str | None, standalone: bool
) -> bool:
    """Write a recording as a test: its shrunk failure if it also fails as a schedule, else the whole recording.

    Returns False if no correct test of it exists.
    """
    from scripted import api
    from scripted.core.mutant import switched_on
    from scripted.reruns import schedule_of_recording
    from scripted.search.shrinking import forms_of
    from scripted.search.windows import cut_to_window

    translation = schedule_of_recording(path, until=until, mutant=mutant)
    schedule = translation.schedule
    console.print(
        f"as a schedule: {len(schedule.placed)} events; {translation.same_steps} of {len(translation.steps)} "
        "recorded steps launch the same",
        soft_wrap=True,
    )
    for note in translation.notes:
        console.print(f"not carried: {note}", soft_wrap=True)
    with switched_on(schedule.adapter, mutant):
        window = cut_to_window(schedule)
    if len(window.placed) < len(schedule.placed):
        console.print(f"it fails in a window of {len(window.placed)} events", soft_wrap=True)
    shrunk = api.shrink(window, mutant=mutant)
    schedules: Iterable[Schedule] = [schedule]
    if shrunk.runs > 1:
        small = shrunk.schedule
        console.print(f"it fails; shrunk to {len(small.placed)} events in {shrunk.seconds:.1f} s: {small}")
        forms = [small] if standalone else forms_of(small, mutant)
        schedules = itertools.chain(forms, schedules if len(schedule.placed) <= _SCRIPT_LIMIT_EVENTS else ())
    elif len(schedule.placed) > _SCRIPT_LIMIT_EVENTS:
        raise ScriptDefinitionError(
            f"a script has at most {_SCRIPT_LIMIT_EVENTS} events, unless a failure can be shrunk; {path} has "
            f"{len(schedule.placed)} and none of them fails; give --until STEP"
        )
    return save_test(console, schedules, to_script, name=path.stem, mutant=mutant, standalone=standalone)


def _show(console: Console, run: Rerun) -> None:
    from scripted.report.table import render_text, step_table

    table = step_table(run.log, last=_SHOWN_STEPS)
    # Files get no trailing blanks.
    console.print(
        table if console.is_terminal else render_text(table, console.width), soft_wrap=not console.is_terminal
    )
    steps = run.log.steps
    if len(steps) > _SHOWN_STEPS:
        console.print("--trace FILE keeps every step, for `scripted view`")
    for line in _verdict(run):
        console.print(visible(line), soft_wrap=True)
    if steps:
        last, begun = steps[-1], "" if run.first_step == 1 else f", of those from step {run.first_step} on"
        console.print(f"{last.step} steps, digest {last.digest}{begun}")


def _verdict(run: Rerun) -> Iterator[str]:
    yield from (f"note: {one}" for one in run.notes)
    yield from (f"met nothing to act on: {one}" for one in run.unreached)
    if run.broken is not None:
        yield f"BROKEN: {run.broken}"
    if run.differs is not None:
        yield f"DIFFERS: {run.differs}"
    elif run.error is not None:
        yield f"{'as recorded, it died of' if run.recorded_error == run.error else 'FAILED:'} {run.error}"
    elif run.recorded_error is not None:
        yield f"DIFFERS: the recorded run died of {run.recorded_error}, this one did not"
    if run.where:
        yield f"raised at {run.where}"


def _same_again(console: Console, target: str, run: Rerun, until: int | None, mutant: str | None) -> bool:
    """Run the determinism self-test: once more here, once in a fresh process."""
    from scripted.report.difference import first_difference
    from scripted.reruns import rerun, rerun_in_fresh_process

    for where, again in (("here", rerun), ("in a fresh process", rerun_in_fresh_process)):
        found = first_difference(run.log, again(target, until=until, mutant=mutant).log, exactly=True)
        if found is not None:
            what = f"step {found.index + 1}, {found.field}: {found.left} and {found.right}"
            console.print(f"NOT DETERMINISTIC {where}: {what}", soft_wrap=True)
            return False
    console.print("the same again here and in a fresh process with another hash seed")
    return True
