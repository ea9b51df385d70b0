"""Runs sessions one after another until every file has a result.

Decides what follows a failure: stop, go on in a new process, or retry a declared flaky failure.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import groupby

import msgspec

from ci.results import FileResult, FileStatus, RunResult, TestOutcome
from ci.selection import SelectedFile
from ci.session import SessionOptions, run_session
from ci.suites import Catalogue

RunSession = Callable[[Sequence[str], SessionOptions], dict[str, FileResult]]


class Sharing(StrEnum):
    """Which files share one pytest process, and with it servers of equal configuration."""

    ALL = "all"
    CONFIGURATION = "configuration"
    FILE = "file"


def run_files(
    files: Sequence[SelectedFile],
    options: SessionOptions,
    catalogue: Catalogue,
    *,
    sharing: Sharing = Sharing.ALL,
    session: RunSession = run_session,
) -> RunResult:
    """Run the files and return a result for each, in order; files not reached are NOT_RUN."""
    results: dict[str, FileResult] = {}
    for group in _groups(files, sharing):
        if options.stop_on_failure and any(not result.ok for result in results.values()):
            break
        results |= _run_group(group, options, catalogue, session)
    missing = {file.path: FileResult(file.path, FileStatus.NOT_RUN, 0.0) for file in files}
    return RunResult(tuple((missing | results)[file.path] for file in files))


def _groups(files: Sequence[SelectedFile], sharing: Sharing) -> Iterable[list[str]]:
    if sharing is Sharing.ALL:
        return [[file.path for file in files]] if files else []
    if sharing is Sharing.FILE:
        return [[file.path] for file in files]
    return [[file.path for file in group] for _, group in groupby(files, key=lambda file: file.engine_key)]


def _run_group(
    paths: Sequence[str], options: SessionOptions, catalogue: Catalogue, session: RunSession
) -> dict[str, FileResult]:
    """Run sessions until no file is left. Each gives at least one file a verdict, so this ends.

    Rounds are never retried: they repeat a test in order to see the flake.
    """
    results: dict[str, FileResult] = {}
    left = list(paths)
    while left:
        found = session(left, options)
        done = {path: result for path, result in found.items() if result.status is not FileStatus.NOT_RUN}
        again = []
        for path, result in done.items():
            results[path] = _joined(results.get(path), result)
            if options.repeat == 1 and _deserves_retry(results[path], catalogue):
                again.append(path)
        left = [path for path in left if path not in done]
        stop = options.stop_on_failure and any(not results[path].ok and path not in again for path in done)
        if stop or not done:
            break
        left += again
    return results


def _deserves_retry(result: FileResult, catalogue: Catalogue) -> bool:
    """Whether all failures have declared classes with a retry left. Timeouts and crashes are never retried."""
    if result.status is not FileStatus.FAILED:
        return False
    errors = {test.error for test in result.tests if test.outcome is TestOutcome.FAILED}
    return all(catalogue.retries(error) >= result.attempts for error in errors)


def _joined(earlier: FileResult | None, result: FileResult) -> FileResult:
    """Return the last try's result, with the errors of earlier tries in its note."""
    if earlier is None:
        return result
    errors = sorted({test.error for test in earlier.tests if test.outcome is TestOutcome.FAILED})
    met = f"try {earlier.attempts} failed by {', '.join(errors)}"
    note = "; ".join(part for part in (earlier.note, met, result.note) if part)
    return msgspec.structs.replace(result, attempts=earlier.attempts + 1, note=note)
