"""Runs after a failure, with sessions that are played from a list."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from sample_tree import REPOSITORY

from ci.results import FileResult, FileStatus, RunResult, TestOutcome, TestResult
from ci.run import Sharing, run_files
from ci.selection import SelectedFile
from ci.session import SessionOptions
from ci.suites import CODE_ERRORS, Catalogue

CATALOGUE = Catalogue.load(REPOSITORY)
FILES = [SelectedFile("a", 1, "one"), SelectedFile("b", 1, "one"), SelectedFile("c", 1, "two")]
FLAKY = "AddressInUseError"


class Sessions:
    """Answers each session from `behaviours`: a status or an exception's name for the next run of a path."""

    def __init__(self, **behaviours: list[str]) -> None:
        self.behaviours = behaviours
        self.asked: list[list[str]] = []

    def __call__(self, paths: Sequence[str], options: SessionOptions) -> dict[str, FileResult]:
        self.asked.append(list(paths))
        results: dict[str, FileResult] = {}
        stopped = False
        for path in paths:
            queue = self.behaviours.get(path, [])
            what = "not run" if stopped else queue.pop(0) if queue else "passed"
            results[path] = result(path, what)
            stopped |= what in ("crashed", "timeout") or (options.stop_on_failure and not results[path].ok)
        return results


def result(path: str, what: str) -> FileResult:
    if what in set(FileStatus):
        return FileResult(path, FileStatus(what), 1.0)
    return FileResult(path, FileStatus.FAILED, 1.0, (TestResult("test_x", TestOutcome.FAILED, 1.0, what),))


def play(sessions: Sessions, *, stop: bool = False, sharing: Sharing = Sharing.ALL) -> RunResult:
    return run_files(
        FILES, SessionOptions(Path(), 1, stop_on_failure=stop), CATALOGUE, sharing=sharing, session=sessions
    )


def statuses(run: RunResult) -> list[str]:
    return [file.status.value for file in run.files]


def test_all_files_share_one_process_when_nothing_goes_wrong() -> None:
    sessions = Sessions()
    assert play(sessions).ok
    assert sessions.asked == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("sharing", "asked"), [(Sharing.CONFIGURATION, [["a", "b"], ["c"]]), (Sharing.FILE, [["a"], ["b"], ["c"]])]
)
def test_sharing_can_be_narrowed(sharing: Sharing, asked: list[list[str]]) -> None:
    sessions = Sessions()
    play(sessions, sharing=sharing)
    assert sessions.asked == asked


@pytest.mark.parametrize("what", ["crashed", "timeout"])
def test_after_a_death_the_rest_goes_on_in_a_new_process(what: str) -> None:
    sessions = Sessions(a=[what])
    run = play(sessions)
    assert statuses(run) == [what, "passed", "passed"]
    assert sessions.asked == [["a", "b", "c"], ["b", "c"]]
    assert not run.ok


def test_without_continue_on_error_the_first_failure_ends_the_run() -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    for sharing in Sharing:
        run = play(Sessions(a=["ValueError"]), stop=True, sharing=sharing)
        assert statuses(run) == ["failed", "not run", "not run"]
        assert (run.failed, run.ok) == (1, False)


def test_with_continue_on_error_every_file_runs() -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    assert statuses(play(Sessions(a=["ValueError"], b=["crashed"]))) == ["failed", "crashed", "passed"]


@pytest.mark.parametrize("stop", [True, False])
def test_a_declared_flaky_failure_is_tried_again_and_remembered(stop: bool) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    sessions = Sessions(a=[FLAKY])
    run = play(sessions, stop=stop)
    assert run.ok
    assert statuses(run) == ["passed"] * 3
    assert (run.files[0].attempts, run.files[0].note) == (2, f"try 1 failed by {FLAKY}")
    assert [asked for asked in sessions.asked if "a" in asked] in (
        [["a", "b", "c"], ["a"]],
        [["a", "b", "c"], ["b", "c", "a"]],
    )


def test_rounds_of_a_flake_hunt_are_not_tried_again() -> None:
    sessions = Sessions(a=[FLAKY])
    assert not run_files(FILES, SessionOptions(Path(), 1, repeat=20), CATALOGUE, session=sessions).ok
    assert len(sessions.asked) == 1


def test_tries_are_bounded() -> None:
    sessions = Sessions(a=[FLAKY] * 5)
    assert statuses(play(sessions)) == ["failed", "passed", "passed"]
    assert len(sessions.asked) == 2


@pytest.mark.parametrize("error", [*sorted(CODE_ERRORS), "SomeOtherError", "", "timeout", "crashed"])
def test_code_errors_and_undeclared_ones_are_never_tried_again(error: str) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    sessions = Sessions(a=[error])
    assert not play(sessions).ok
    assert [path for asked in sessions.asked for path in asked].count("a") == 1


def test_a_code_error_beside_a_flaky_one_is_not_tried_again() -> None:
    tests = tuple(TestResult(f"test_{error}", TestOutcome.FAILED, 0.1, error) for error in (FLAKY, "AssertionError"))

    def session(paths: Sequence[str], options: SessionOptions) -> dict[str, FileResult]:
        return {path: FileResult(path, FileStatus.FAILED, 0.2, tests) for path in paths}

    run = run_files(FILES[:1], SessionOptions(Path(), 1), CATALOGUE, session=session)
    assert (run.files[0].attempts, run.ok) == (1, False)


def test_no_files_is_a_green_run_of_nothing() -> None:
    run = run_files([], SessionOptions(Path(), 1), CATALOGUE, session=Sessions())
    assert (run.ok, run.last_line) == (True, "0 passed, 0 failed")
