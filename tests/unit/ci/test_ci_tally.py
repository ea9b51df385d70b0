"""The tally of each file from a stream of events, without a process."""

from ci.events import Collected, CollectFailed, Event, Finished, Reported, SessionEnded, Started, decode, encode
from ci.results import FileStatus, TestOutcome
from ci.tally import BETWEEN_FILES_TIMEOUT_S, Tally

A, B = "tests/a.py", "tests/b.py"


def run(file: str, name: str, *phases: str, error: str = "") -> list[Event]:
    test = f"{file}::{name}"
    reports = [Reported(file, test, phase, 0.5, error if phase == "failed" else "", "") for phase in phases]
    return [Started(file, test), *reports, Finished(file, test)]


def tally(*events: Event, now: float = 0.0) -> Tally:
    made = Tally([A, B], 10.0, 0.0)
    for event in [Collected(A, 2), Collected(B, 1), *events]:
        made.apply(event, now)
    return made


def statuses(made: Tally, code: int) -> list[FileStatus]:
    return [result.status for result in made.exited(code).values()]


PASSED_A = [*run(A, "test_1", "passed", "passed", "passed"), *run(A, "test_2", "passed", "skipped", "passed")]


def test_an_orderly_run() -> None:
    made = tally(*PASSED_A, *run(B, "test_3", "passed", "failed", "passed", error="ValueError"), SessionEnded(1))
    results = made.exited(1)
    assert statuses(made, 1) == [FileStatus.PASSED, FileStatus.FAILED]
    assert [test.outcome for test in results[A].tests] == [TestOutcome.PASSED, TestOutcome.SKIPPED]
    assert results[A].seconds == 3.0
    assert results[B].tests[0].error == "ValueError"


def test_a_failed_tear_down_fails_the_test() -> None:
    made = tally(*PASSED_A, *run(B, "test_3", "passed", "passed", "failed"), SessionEnded(1))
    assert statuses(made, 1) == [FileStatus.PASSED, FileStatus.FAILED]


def test_a_file_that_cannot_be_collected_failed() -> None:
    made = Tally([A, B], 10.0, 0.0)
    for event in [
        CollectFailed(A, "SyntaxError", "E   SyntaxError: x"),
        Collected(B, 1),
        *run(B, "t", "passed"),
        SessionEnded(1),
    ]:
        made.apply(event, 0.0)
    assert statuses(made, 1) == [FileStatus.FAILED, FileStatus.PASSED]
    assert made.exited(1)[A].tests[0].error == "SyntaxError"


def test_nothing_selected_is_empty_only_after_an_orderly_end() -> None:
    made = Tally([A], 10.0, 0.0)
    assert statuses(made, -9) == [FileStatus.CRASHED]
    made.apply(SessionEnded(5), 0.0)
    assert statuses(made, 5) == [FileStatus.EMPTY]
    assert "none of its tests was collected" in made.exited(5)[A].note


def test_a_crash_blames_the_file_at_work() -> None:
    made = tally(*PASSED_A[:5], Started(A, f"{A}::test_2"))
    result = made.exited(-11)
    assert statuses(made, -11) == [FileStatus.CRASHED, FileStatus.NOT_RUN]
    assert "signal 11" in result[A].note
    assert [(test.name, test.error) for test in result[A].tests] == [("test_1", ""), ("test_2", "crashed")]
    assert result[A].failures == 1


def test_a_crash_between_files_blames_the_next_one_and_at_the_end_the_last() -> None:
    assert statuses(tally(*PASSED_A), -9) == [FileStatus.PASSED, FileStatus.CRASHED]
    done = tally(*PASSED_A, *run(B, "test_3", "passed"))
    assert statuses(done, -9) == [FileStatus.PASSED, FileStatus.CRASHED]


def test_a_bad_exit_without_a_failed_test_is_not_swallowed() -> None:
    made = tally(*PASSED_A, *run(B, "test_3", "passed"), SessionEnded(1))
    assert statuses(made, 1) == [FileStatus.PASSED, FileStatus.CRASHED]


def test_refused_arguments_fail_every_file_at_once() -> None:
    assert statuses(Tally([A, B], 10.0, 0.0), 4) == [FileStatus.CRASHED, FileStatus.CRASHED]


def test_the_deadline_is_of_the_file_at_work_and_else_of_the_silence() -> None:
    made = tally(now=100.0)
    assert made.deadline == 100.0 + BETWEEN_FILES_TIMEOUT_S
    made.apply(Started(A, f"{A}::test_1"), 200.0)
    made.apply(Finished(A, f"{A}::test_1"), 205.0)
    assert made.deadline == 210.0  # The file's, not the test's.
    made.apply(Started(A, f"{A}::test_2"), 206.0)
    assert made.deadline == 210.0
    for event in run(A, "test_2", "passed"):
        made.apply(event, 207.0)
    assert made.deadline == 207.0 + BETWEEN_FILES_TIMEOUT_S


def test_a_late_file_is_blamed_with_the_stacks() -> None:
    """E02: per-file timeouts with stacks."""
    made = tally(*PASSED_A[:5], Started(A, f"{A}::test_2"))
    results = made.late(10.0, "File x.py, line 3")
    assert results[A].status is FileStatus.TIMEOUT
    assert "line 3" in results[A].note
    assert [test.error for test in results[A].tests] == ["", "timeout"]
    assert results[B].status is FileStatus.NOT_RUN


def test_events_survive_the_pipe() -> None:
    for event in [*PASSED_A, SessionEnded(0), Collected(A, 1), CollectFailed(A, "E", "x\ny")]:
        line = encode(event)
        assert line.endswith(b"\n")
        assert decode(line) == event
