"""What ``scripted explore`` and ``scripted gallery find`` show: a bar while they search, then tables and findings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.output_files import write_output
from scripted.core.named import adapter_named
from scripted.core.schedule import Schedule
from scripted.search.campaign import Campaign, Report
from scripted.search.execution import Prefixes
from scripted.search.mutant_search import Found, find_mutant
from scripted.search.shrinking import shrink
from scripted.search.targets import target_named
from scripted.search.units import Finding, SearchPlan
from scripted.search.written_test import write_test

__all__ = ["plain_console", "save_test", "search", "search_for_mutants"]

_PLAIN_WIDTH_COLUMNS = 160
# Findings that are shrunk and shown; further ones are mostly the same failure again.
_SHOWN_FINDINGS = 5
_LONGEST_NAME = 30


def search(plan: SearchPlan, *, to_script: Path | None, coverage: bool) -> bool:
    """Run a campaign and show what it found; True when it found nothing."""
    console = plain_console()
    report = _run_with_progress(plan, console)
    if coverage and report.coverage.counts:
        console.print(report.coverage.table())
    console.print(_summary(report), soft_wrap=True)
    for finding in list(report.findings.values())[:_SHOWN_FINDINGS]:
        if _show_finding(console, finding, plan, to_script):
            to_script = None
    if to_script is not None:
        why = "no failure shown makes a test" if report.findings else "there is no failure to write"
        console.print(f"{to_script} is not written: {why}", soft_wrap=True)
    return not report.findings


def search_for_mutants(names: Sequence[str], of: str) -> list[Found]:
    """Search for an adapter's mutants one by one and show what it took."""
    console = plain_console()
    found = []
    for name in names:
        found.append(find_mutant(name, of))
        console.print(_found_text(found[-1]), soft_wrap=True)
    missed, skipped = [one.mutant for one in found if one.is_missed], [one.mutant for one in found if one.misfit]
    said = f"found {len(found) - len(missed) - len(skipped)} of {len(found)}"
    said += f", not {', '.join(missed)}" if missed else ""
    console.print(said + (f", skipped {', '.join(skipped)}" if skipped else ""))
    return found


def plain_console() -> Console:
    """A terminal as it is, or a file with long lines."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH_COLUMNS, highlight=False, markup=False)


def _run_with_progress(plan: SearchPlan, console: Console) -> Report:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("searching", total=plan.schedules)

        def show(report: Report) -> None:
            said = (
                f"{report.schedules} schedules, {report.per_cpu_second:.0f}/s a core, {len(report.findings)} failures"
            )
            progress.update(task, completed=report.schedules, description=said)

        return Campaign(plan, show).run()


def _summary(report: Report) -> str:
    how = "complete" if report.complete else "stopped before the end"
    return (
        f"{report.schedules} schedules in {report.seconds:.1f} s ({report.cpu_s:.1f} s of process time, "
        f"{report.per_cpu_second:.0f} a second and core), {how}; {report.unreached} events met nothing to act on; "
        f"{len(report.coverage.counts)} cells covered; {len(report.findings)} kinds of failure"
    )


def save_test(
    console: Console, schedules: Sequence[Schedule], path: Path, *, name: str, mutant: str | None = None
) -> bool:
    """Write the first of these schedules that makes a test, and say what was seen; True when a file was written."""
    written = write_test(schedules, name=name, mutant=mutant)
    for line in written.said:
        console.print(f"  {line}", soft_wrap=True)
    if written.text is not None:
        write_output(path, written.text)
    console.print(f"  written as {path}" if written.text else f"  no test is written as {path}", soft_wrap=True)
    return written.text is not None


def _show_finding(console: Console, finding: Finding, plan: SearchPlan, to_script: Path | None) -> bool:
    """Print a finding, shrunk; True when it was written as a test."""
    console.print(f"\nFAILED on {finding.target}: {finding.failure}", soft_wrap=True)
    adapter, mutant = adapter_named(plan.adapter), plan.mutant
    target = target_named(finding.target, plan.adapter)
    if not isinstance(target, Prefixes):
        added = "; ".join(map(str, finding.extra))
        by_itself = "it fails by itself, with nothing added: mend it with pytest first"
        console.print(f"  added to the script: {added}" if added else f"  {by_itself}", soft_wrap=True)
        if to_script is not None:
            console.print("  no test is written: add the verbs of these events to the script itself", soft_wrap=True)
        return False
    found = target.base.with_placed(finding.extra)
    with adapter.switched_on(mutant):
        shrunk = shrink(found)
    flag = f" --mutant {mutant}" if mutant else ""
    if not shrunk.fails:
        console.print(
            "  it does not fail from its beginning: the machine is not deterministic, or its copies share something",
            soft_wrap=True,
        )
    console.print(
        f"  shrunk to {len(shrunk.schedule.placed)} events in {shrunk.seconds:.2f} s ({shrunk.runs} runs):",
        soft_wrap=True,
    )
    console.print(f"  scripted replay '{shrunk.schedule}'{flag}", soft_wrap=True)
    if to_script is None:
        return False
    return save_test(console, (shrunk.schedule, found), to_script, name=_name_of(finding), mutant=mutant)


def _found_text(found: Found) -> str:
    if found.misfit:
        return f"{found.mutant}: SKIPPED: {found.misfit}"
    if found.finding is None:
        return f"{found.mutant}: NOT FOUND in {found.schedules} schedules, {found.cpu_s:.2f} s"
    extra = "; ".join(map(str, found.finding.extra)) or "nothing"
    return (
        f"{found.mutant}: schedule {found.schedules}, {found.cpu_s:.2f} s of process time: {found.finding.target} with "
        f"{extra} added: {found.finding.failure}"
    )


def _name_of(finding: Finding) -> str:
    target = finding.target if len(finding.target) < _LONGEST_NAME else "schedule"
    return f"{re.sub(r'[^a-z]+', '_', target.lower()).strip('_')}_breaks"
