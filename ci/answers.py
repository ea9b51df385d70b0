"""Writes the answers on a pull request. Strangers' text appears only as `ci.quoting` shows it."""

import shlex
from collections.abc import Sequence

from ci.batches import Batch, Cut
from ci.commands import Explore, RerunTest
from ci.github import WorkflowRun
from ci.quoting import quoted
from ci.results import FileResult, RunResult

FAILURES_SHOWN_MAX = 20
TARGETS_SHOWN_MAX = 20


def refused(reason: str) -> str:
    """Answer a refused command."""
    return f"Not done: {reason}{'' if reason.endswith(('?', '.')) else '.'}"


def failed(command: str, reason: str) -> str:
    """Answer a command that GitHub's API failed."""
    return f"`/{command}` did not get through: {reason}. Parts of it may have started; give it again in a few minutes."


def rerun_tests(command: RerunTest, cut: Cut, links: Sequence[str], sha: str) -> str:
    """Answer `/rerun-test`: a row for each run, the local command, and the targets left out."""
    rounds = "" if command.repeat == 1 else f", {command.repeat} rounds"
    lines = [f"Running on `{sha[:12]}`{rounds}:", "", "| runner | tests | about | run |", "| --- | --- | --- | --- |"]
    lines += [_row(batch, link) for batch, link in zip(cut.batches, links, strict=True)]
    lines += [f"\nLeft out: `{path}` ({quoted(reason)})" for path, reason in cut.disabled]
    return "\n".join([*lines, "", *_locally(local_rerun(command)), "", "The results will be told here."])


def local_rerun(command: RerunTest) -> str:
    """Return the command that does the same on the reader's own machine."""
    words = ["python", "-m", "ci", "rerun-test", *command.specs]
    words += ["--repeat", str(command.repeat)] if command.repeat != 1 else []
    words += ["--tier", command.tier.value] if command.tier else []
    return shlex.join(words)


def staged(name: str, link: str, local: str, sha: str) -> str:
    return "\n".join([f"Running `{name}` on `{sha[:12]}`: {link}", "", *_locally(local)])


def explored(command: Explore, link: str, sha: str) -> str:
    local = shlex.join(["scripted", "explore", command.scenario, "--minutes", str(command.minutes)])
    head = f"Exploring `{command.scenario}` for {command.minutes} minutes on `{sha[:12]}`: {link}"
    return "\n".join([head, "", *_locally(local)])


def rerun(runs: Sequence[WorkflowRun], sha: str) -> str:
    if not runs:
        return f"Nothing to run again: no finished run of `{sha[:12]}` failed."
    links = ", ".join(f"[{quoted(run.name or str(run.id))}]({run.html_url})" for run in runs)
    return f"Running the failed jobs of `{sha[:12]}` again: {links}"


def result(ticket: str, conclusion: str, url: str, results: RunResult | None) -> str:
    """Report how a dispatched run ended. The code under test wrote `results`: it is shown, not trusted."""
    lines = [f"{quoted(ticket)} ended with **{conclusion}**: [run]({url})"]
    if results is None:
        return "\n".join([*lines, "", "It left no results of single tests."])
    lines += ["", f"{results.passed} passed, {results.failed} failed", ""]
    rows = [row for file in results.files if not file.ok for row in _failures(file)]
    if rows:
        lines += ["| test | failed | runs | by |", "| --- | --- | --- | --- |", *rows[:FAILURES_SHOWN_MAX]]
    if len(rows) > FAILURES_SHOWN_MAX:
        lines.append(f"\nand {len(rows) - FAILURES_SHOWN_MAX} more, see the run")
    return "\n".join(lines)


def _row(batch: Batch, link: str) -> str:
    shown = ", ".join(f"`{target}`" for target in batch.targets[:TARGETS_SHOWN_MAX])
    more = len(batch.targets) - TARGETS_SHOWN_MAX
    shown += f" and {more} more" if more > 0 else ""
    return f"| {batch.runner} | {shown} | {max(1, round(batch.seconds / 60))} min | {link} |"


def _locally(command: str) -> list[str]:
    return ["The same on your machine:", "```", command, "```"]


def _failures(file: FileResult) -> list[str]:
    """Return a row for each failed test, or one for a file that ended without a verdict."""
    rows = [
        f"| {_cell(f'{file.path}::{name}')} | {len(errors)} | {runs} | {_cell(errors[-1])} |"
        for name, (runs, errors) in file.failed_tests.items()
    ]
    return rows or [f"| {_cell(file.path)} | | | {_cell(str(file.status))} |"]


def _cell(text: str) -> str:
    return quoted(text.replace("|", "/"))
