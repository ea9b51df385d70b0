"""Prints the table at the end of a run. Decides nothing."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci.results import FileResult, FileStatus, RunResult, TestOutcome
from ci.selection import SelectedFile

STYLES = {
    FileStatus.PASSED: "green",
    FileStatus.EMPTY: "bold red",
    FileStatus.NOT_RUN: "yellow",
    FileStatus.FAILED: "bold red",
    FileStatus.TIMEOUT: "bold red",
    FileStatus.CRASHED: "bold red",
}
MORE_ERRORS_MAX = 10


def print_plan(console: Console, files: Sequence[SelectedFile], disabled: Sequence[tuple[str, str]]) -> None:
    """Print how many files will run, and the disabled ones."""
    total = sum(file.seconds for file in files)
    console.print(f"{len(files)} files, about {total:.0f} s", highlight=False)
    for path, reason in disabled:
        console.print(Text(f"disabled: {path}: {reason}", style="yellow"))


def print_summary(console: Console, result: RunResult, planned: Sequence[SelectedFile]) -> None:
    """Print a row for each file, then the failures, then the counts on the last line."""
    expected = {file.path: file.seconds for file in planned}
    table = Table(box=None, pad_edge=False)
    for title in ("file", "status", "passed", "failed", "skipped", "seconds", "expected"):
        table.add_column(title, justify="left" if title in ("file", "status") else "right", overflow="fold")
    for file in result.files:
        table.add_row(*_row(file, expected.get(file.path)))
    console.print(table)
    killed = any(file.status in (FileStatus.TIMEOUT, FileStatus.CRASHED) for file in result.files)
    for file in result.files:
        for line in [*_complaints(file), *(_tracebacks(file) if killed else [])]:
            console.print(Text(line), soft_wrap=True)
    console.print(result.last_line, highlight=False)


def _row(file: FileResult, expected: float | None) -> list[Text]:
    status = f"{file.status}" if file.attempts == 1 else f"{file.status} (try {file.attempts})"
    return [
        Text(file.path),
        Text(status, style=STYLES[file.status]),
        Text(str(file.count(TestOutcome.PASSED))),
        Text(str(file.failures)),
        Text(str(file.count(TestOutcome.SKIPPED))),
        Text(f"{file.seconds:.2f}"),
        Text("" if expected is None else f"{expected:.2f}"),
    ]


def _complaints(file: FileResult) -> list[str]:
    """Return a line for each failing test with its number of failures, and the file's note."""
    failed = file.failed_tests
    lines = [
        f"{file.path}::{name}: failed {len(errors)} of {runs} ({', '.join(sorted({one or 'error' for one in errors}))})"
        for name, (runs, errors) in list(failed.items())[:MORE_ERRORS_MAX]
    ]
    if len(failed) > MORE_ERRORS_MAX:
        lines.append(f"{file.path}: and {len(failed) - MORE_ERRORS_MAX} more")
    return [*lines, f"{file.path}: {file.note}"] if file.note else lines


def _tracebacks(file: FileResult) -> list[str]:
    """Return the failure texts that a killed pytest did not print."""
    failed = [test for test in file.tests if test.outcome is TestOutcome.FAILED and test.text]
    return [f"{file.path}::{test.name}:\n{test.text}" for test in failed[:MORE_ERRORS_MAX]]
