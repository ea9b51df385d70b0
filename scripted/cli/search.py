"""The commands of the search: ``scripted explore``, ``scripted replay``, ``scripted gallery find``.

Owns their words and their output; the work is done in ``scripted.search`` and ``scripted.replay``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.output_files import require_writable
from scripted.core.named import OWN
from scripted.core.refusals import ScriptDefinitionError
from scripted.search.strategies.base import StrategyName

__all__ = ["add_commands"]

EXIT_FAILED = 1
_SECONDS_PER_MINUTE = 60.0
_ADAPTER = typer.Option(metavar="ADAPTER", help="the scheduler: lockstep, vllm, FILE.py with a ADAPTER, or MODULE:NAME")


def add_commands(app: typer.Typer, gallery: typer.Typer) -> None:
    """Mount the commands on ``scripted`` and on ``scripted gallery``."""
    app.command()(explore)
    app.command()(replay)
    gallery.command("find")(find)


def explore(
    target: Annotated[
        str | None,
        typer.Argument(help="a workload, a schedule, or FILE::NAME of a script or Schedule; default: all workloads"),
    ] = None,
    strategy: Annotated[StrategyName, typer.Option(help="what is added to a target")] = StrategyName.EXHAUSTIVE,
    schedules: Annotated[int | None, typer.Option(min=1, help="stop after this many schedules")] = None,
    minutes: Annotated[float | None, typer.Option(help="stop after this many minutes, more than 0")] = None,
    seed: Annotated[int, typer.Option(help="of random and pct")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="a Ray cluster, 'auto' for the one around, or 'local'")
    ] = None,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch a bug of the gallery on")] = None,
    to_script: Annotated[Path | None, typer.Option(metavar="FILE", help="write the first failure as a test")] = None,
    coverage: Annotated[bool, typer.Option(help="show which events met which states")] = True,
    adapter: Annotated[str, _ADAPTER] = OWN,
    version_check: Annotated[
        bool, typer.Option("--version-check", help="only say whether the adapter was tried with what is installed")
    ] = False,
) -> None:
    """Search for schedules that break a scheduler. What is found is shrunk, and makes the exit status 1."""
    from scripted.core.named import adapter_named
    from scripted.core.schedule import Schedule
    from scripted.search.console import search
    from scripted.search.targets import is_one_word, target_named
    from scripted.search.units import SearchPlan

    if version_check:
        _check_version(adapter)
        return
    require_writable("--to-script", to_script)
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ScriptDefinitionError(
            f"--minutes takes more than 0, got {minutes:g}: a search without time finds nothing"
        )
    if target is not None:
        if "::" not in target and not is_one_word(target, adapter):
            adapter = Schedule.parse(target, of=adapter).of
        target_named(target, adapter)
    with adapter_named(adapter).switched_on(mutant):
        pass  # An unknown name is refused before anything runs.
    endless = strategy in (StrategyName.RANDOM, StrategyName.PCT)
    unbounded = endless and minutes is None and schedules is None
    plan = SearchPlan(
        targets=tuple(adapter_named(adapter).workloads) if target is None else (target,),
        strategy=strategy,
        seed=seed,
        schedules=schedules,
        seconds=_SECONDS_PER_MINUTE if unbounded else None if minutes is None else minutes * _SECONDS_PER_MINUTE,
        jobs=jobs,
        ray=ray,
        mutant=mutant,
        adapter=adapter,
    )
    if not search(plan, to_script=to_script, coverage=coverage):
        raise typer.Exit(EXIT_FAILED)


def _check_version(adapter: str) -> None:
    from scripted.core.named import adapter_named

    check = getattr(adapter_named(adapter), "version_check", None)
    if check is None:
        raise ScriptDefinitionError(f"the adapter {adapter} has no versions to check: it comes along with its adapter")
    tried, said = check()
    typer.echo(said)
    if not tried:
        raise typer.Exit(EXIT_FAILED)


def replay(
    what: Annotated[str, typer.Argument(metavar="SCHEDULE|RECORDING", help="a schedule's line, or a recording's file")],
    until: Annotated[int | None, typer.Option(min=1, metavar="STEP", help="stop after this step")] = None,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch a bug of the gallery on")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="write the steps down for `scripted view`")] = None,
    to_script: Annotated[Path | None, typer.Option(metavar="FILE", help="write a test of it")] = None,
    twice: Annotated[
        bool, typer.Option(help="run it again, here and in a fresh process with another hash seed, and compare")
    ] = False,
    adapter: Annotated[str, _ADAPTER] = OWN,
) -> None:
    """Run a schedule or a recording again, without model and sockets. Exit status 1 when a check fails."""
    from scripted.core.schedule import Schedule
    from scripted.replay import is_recording
    from scripted.replay.printing import replay_recording, replay_schedule
    from scripted.search.console import plain_console
    from scripted.search.targets import is_one_word, workload_named

    require_writable("--trace", trace)
    require_writable("--to-script", to_script)
    console = plain_console()
    if is_recording(what):
        passed = replay_recording(
            console, Path(what), until=until, mutant=mutant, trace=trace, to_script=to_script, twice=twice
        )
    else:
        schedule = workload_named(what, adapter) if is_one_word(what, adapter) else Schedule.parse(what, of=adapter)
        if not schedule.placed:
            raise ScriptDefinitionError(f"the schedule {what!r} has no actions, so replaying it shows nothing")
        passed = replay_schedule(
            console, str(schedule), until=until, mutant=mutant, trace=trace, to_script=to_script, twice=twice
        )
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def find(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a mutant of the gallery")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all of them")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="write the gallery's table")] = None,
    adapter: Annotated[str, _ADAPTER] = OWN,
) -> None:
    """Search for a mutant unaided. Says which schedule shows it, after how many, in how much process time."""
    if (name is None) != everything:
        raise typer.BadParameter("give the name of one mutant, or --all; `scripted gallery list` shows them")
    require_writable("--markdown", markdown)
    from scripted.core.named import adapter_named
    from scripted.search.console import search_for_mutants

    known = adapter_named(adapter)
    if not known.mutant_names:
        raise ScriptDefinitionError(
            f"{adapter} has no mutants to search for; docs/your_scheduler.md says how to give it some"
        )
    found = search_for_mutants(known.mutant_names if name is None else [name], adapter)
    if markdown is not None:
        known.write_mutants(markdown, found)
    if all(one.finding is None for one in found) or any(one.is_missed for one in found):
        raise typer.Exit(EXIT_FAILED)
