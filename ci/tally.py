"""Tracks each file while pytest runs: a state machine over events, and the deadlines that follow from it.

Pure: the caller passes the time. `ci.session` feeds it from a live process.
"""

from collections.abc import Sequence

import msgspec

from ci.events import Collected, CollectFailed, CollectSkipped, Event, Finished, Reported, SessionEnded, Started
from ci.results import FileResult, FileStatus, TestOutcome, TestResult

# Collection, shared set-up and the stop of shared servers belong to no file; this bounds the silence between files.
BETWEEN_FILES_TIMEOUT_S = 300.0
USAGE_ERROR = 4
CLEAN_EXITS = (0, 5)  # All passed; nothing selected.


class FileTally:
    def __init__(self, path: str) -> None:
        self.path = path
        self.expected = 0
        self.finished = 0
        self.deadline: float | None = None
        self.collect_error: TestResult | None = None
        self.skipped_for = ""
        self.tests: list[TestResult] = []
        self._open: dict[str, TestResult] = {}

    @property
    def is_over(self) -> bool:
        """Whether no further event is expected for this file."""
        return self.collect_error is not None or (self.expected > 0 and self.finished >= self.expected)

    def start(self, test: str) -> None:
        self._open[test] = TestResult(test.partition("::")[2], TestOutcome.PASSED, 0.0)

    def report(self, event: Reported) -> None:
        """Fold one phase into the open run of its test: a failure wins over a skip, a skip over a pass."""
        name = event.test.partition("::")[2]
        earlier = self._open.get(event.test, TestResult(name, TestOutcome.PASSED, 0.0))
        outcome = TestOutcome(event.outcome) if event.outcome in set(TestOutcome) else TestOutcome.FAILED
        if TestOutcome.FAILED in (earlier.outcome, outcome):
            outcome = TestOutcome.FAILED
        elif TestOutcome.SKIPPED in (earlier.outcome, outcome):
            outcome = TestOutcome.SKIPPED
        text = "\n".join(part for part in (earlier.text, event.text) if part)
        seconds = earlier.seconds + event.seconds
        self._open[event.test] = TestResult(name, outcome, seconds, earlier.error or event.error, text)

    def finish(self, test: str) -> None:
        self.finished += 1
        if test in self._open:
            self.tests.append(self._open.pop(test))

    def result(self, status: FileStatus | None = None, note: str = "") -> FileResult:
        """Return the result so far. A given ``status`` fails the tests that are still open."""
        tests = (*self.tests, *([self.collect_error] if self.collect_error else []))
        if status is None:
            status = self._own_status(tests)
        else:
            tests += tuple(
                msgspec.structs.replace(test, outcome=TestOutcome.FAILED, error=test.error or str(status))
                for test in self._open.values()
            )
        if status is FileStatus.EMPTY:
            note = self.skipped_for or "none of its tests was collected; look at what was given to pytest"
        return FileResult(self.path, status, round(sum(test.seconds for test in tests), 3), tests, note=note)

    def _own_status(self, tests: Sequence[TestResult]) -> FileStatus:
        if any(test.outcome is TestOutcome.FAILED for test in tests):
            return FileStatus.FAILED
        if self.is_over:
            return FileStatus.PASSED
        return FileStatus.NOT_RUN if self.expected else FileStatus.EMPTY


class Tally:
    """All files of one pytest process. `timeout_s` is the wall time that one file may take in it."""

    def __init__(self, paths: Sequence[str], timeout_s: float, now: float) -> None:
        self._files = {path: FileTally(path) for path in paths}
        self._timeout_s = timeout_s
        self._quiet_since = now
        self._last_active: FileTally | None = None
        self.exit_status: int | None = None

    def apply(self, event: Event, now: float) -> None:
        """Take one event. An event outside the run's files (in a conftest) counts for the first file."""
        self._quiet_since = now
        if isinstance(event, SessionEnded):
            self.exit_status = event.status
            return
        file = self._files.get(event.file) or next(iter(self._files.values()))
        match event:
            case Collected():
                file.expected += event.count
            case CollectFailed():
                file.collect_error = TestResult("collection", TestOutcome.FAILED, 0.0, event.error, event.text)
            case CollectSkipped():
                file.skipped_for = event.reason
            case Started():
                file.start(event.test)
                file.deadline = file.deadline or now + self._timeout_s
                self._last_active = file
            case Reported():
                file.report(event)
            case Finished():
                file.finish(event.test)

    @property
    def deadline(self) -> float:
        """The time at which the process is killed unless another event arrives first."""
        active = [file.deadline for file in self._active() if file.deadline is not None]
        return min(active) if active else self._quiet_since + BETWEEN_FILES_TIMEOUT_S

    def late(self, now: float, stacks: str) -> dict[str, FileResult]:
        """Return the results of a process that was killed at its deadline; the files to blame get TIMEOUT."""
        overdue = [file for file in self._active() if file.deadline is not None and file.deadline <= now]
        if overdue:
            what = f"took longer than {self._timeout_s:g} s"
        else:
            overdue, what = self._suspects(), f"nothing happened for {BETWEEN_FILES_TIMEOUT_S:g} s between tests"
        return self._results(overdue, FileStatus.TIMEOUT, f"{what}; stacks when it was stopped:\n{stacks}")

    def exited(self, code: int) -> dict[str, FileResult]:
        """Return the results of a process that ended by itself, orderly or not."""
        if code == USAGE_ERROR:
            text = "pytest refused its arguments; its own message stands above"
            return self._results(list(self._files.values()), FileStatus.CRASHED, text)
        if self.exit_status is None or code != self.exit_status:
            return self._results(self._suspects(), FileStatus.CRASHED, f"the process {_exit_text(code)} in this file")
        failed = any(file.result().status is FileStatus.FAILED for file in self._files.values())
        if code not in CLEAN_EXITS and not failed:
            text = f"pytest exited with status {code} though no test failed"
            return self._results(self._suspects(), FileStatus.CRASHED, text)
        return self._results([], FileStatus.CRASHED, "")

    def _active(self) -> list[FileTally]:
        return [file for file in self._files.values() if file.deadline is not None and not file.is_over]

    def _suspects(self) -> list[FileTally]:
        """Return the files to blame if no test was late: the active ones, else the next, else the last."""
        waiting = [file for file in self._files.values() if not file.is_over and file.expected]
        unknown = [file for file in self._files.values() if not file.is_over]
        last = [self._last_active] if self._last_active else []
        return self._active() or waiting[:1] or last or unknown[:1]

    def _results(self, blamed: Sequence[FileTally], status: FileStatus, note: str) -> dict[str, FileResult]:
        """Give all but the blamed files their own verdict. A file can be EMPTY only after an orderly end."""
        results = {}
        for path, file in self._files.items():
            result = file.result(status, note) if file in blamed else file.result()
            if result.status is FileStatus.EMPTY and self.exit_status is None:
                result = file.result(FileStatus.NOT_RUN)
            results[path] = result
        return results


def _exit_text(code: int) -> str:
    return f"died by signal {-code}" if code < 0 else f"exited with status {code}"
