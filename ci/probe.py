"""The pytest plugin that a suite run loads with `-p ci.probe`: reports progress by file, dumps stacks on a signal.

Decides nothing and prints nothing. With xdist the controller reports, and each worker dumps its own stacks.
"""

import copy
import faulthandler
import os
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest

from ci.events import (
    STACKS_SIGNAL,
    Collected,
    CollectFailed,
    CollectSkipped,
    Event,
    Finished,
    Reported,
    SessionEnded,
    Started,
    encode,
)

TEXT_MAX_CHARS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options that a suite run passes."""
    group = parser.getgroup("ci")
    group.addoption("--ci-events-fd", type=int, help="file descriptor for progress events")
    group.addoption("--ci-stacks", type=Path, help="folder for the stacks that SIGUSR2 asks for")
    group.addoption("--ci-repeat", type=int, default=1, help="run every test this often, in one process")
    group.addoption("--ci-stop", action="store_true", help="stop after the first file with a failure")


def pytest_configure(config: pytest.Config) -> None:
    """Arm the stack dump everywhere, and the reporter where events can be written."""
    stacks: Path | None = config.getoption("--ci-stacks")
    if stacks is not None:
        _arm_stacks(config, stacks)
    # Registered scripts meet a stricter check: each fails under its own mutant.
    config.option.scripted_vet = "off"
    config.pluginmanager.register(Repeater(config.getoption("--ci-repeat")), "ci-repeater")
    events_fd: int | None = config.getoption("--ci-events-fd")
    if events_fd is not None and not hasattr(config, "workerinput"):
        os.set_inheritable(events_fd, False)
        config.pluginmanager.register(Reporter(config, events_fd), "ci-reporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the exception's class name on the report: xdist carries plain attributes from worker to controller."""
    report = yield
    if call.excinfo is not None:
        report.__dict__["ci_error"] = call.excinfo.typename
    return report


class Repeater:
    """Runs the collected tests several times, in rounds, in one process: servers stay warm between rounds."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Append the items again for each further round."""
        items += [_again(item) for _ in range(self._rounds - 1) for item in list(items)]


class Reporter:
    """Writes one event per line to the descriptor."""

    def __init__(self, config: pytest.Config, events_fd: int) -> None:
        self._config = config
        self._events_fd = events_fd
        self._stop = bool(config.getoption("--ci-stop"))
        self._left: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session, so that it can be stopped."""
        self._session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that could not be collected, or skips itself."""
        if report.failed:
            file = _file_of(report.nodeid)
            text = report.longreprtext
            self._send(CollectFailed(file, _error_in(text), text[-TEXT_MAX_CHARS:]))
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._send(CollectSkipped(_file_of(report.nodeid), report.longrepr[2][-TEXT_MAX_CHARS:]))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Report the number of runs of each file; an xdist controller collects nothing itself."""
        self._count(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Report the workers' collection, which is the same on each."""
        if not self._left:
            self._count(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(Started(_file_of(nodeid), nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file_of(report.nodeid)
        text = report.longreprtext[-TEXT_MAX_CHARS:] if report.failed else ""
        error = str(getattr(report, "ci_error", "")) if report.failed else ""
        if report.failed:
            self._failed.add(file)
        self._send(Reported(file, report.nodeid, report.outcome, report.duration, error, text))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Report the end of a test. With --ci-stop, stop at the end of a file with a failure."""
        file = _file_of(nodeid)
        self._left[file] -= 1
        self._send(Finished(file, nodeid))
        if self._stop and file in self._failed and self._left[file] <= 0 and self._session is not None:
            self._session.shouldstop = f"{file} failed"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Report the end, after every other plugin."""
        self._send(SessionEnded(int(exitstatus)))

    def _count(self, nodeids: Iterable[str]) -> None:
        self._left = Counter(_file_of(nodeid) for nodeid in nodeids)
        for file, count in self._left.items():
            self._send(Collected(file, count))

    def _send(self, event: Event) -> None:
        line = encode(event)
        while line:
            line = line[os.write(self._events_fd, line) :]


def _again(item: pytest.Item) -> pytest.Item:
    """Return another run of the item: pytest keeps a test set up if the next one is the same object."""
    other = copy.copy(item)
    if isinstance(other, pytest.Function):
        other._initrequest()  # noqa: SLF001 (the copy would fill the fixtures of the original)
    return other


def _arm_stacks(config: pytest.Config, folder: Path) -> None:
    # chain=True: after the dump the signal's default action ends the process.
    file = (folder / f"{os.getpid()}.txt").open("w", encoding="utf-8")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=True)

    def disarm() -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        file.close()

    config.add_cleanup(disarm)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _error_in(text: str) -> str:
    """Take the exception's class name from the last line of a collection error that starts with one."""
    for line in reversed(text.splitlines()):
        word = line.removeprefix("E").strip().partition(":")[0]
        if word.isidentifier():
            return word
    return ""
