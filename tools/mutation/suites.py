"""What may notice a mutant: the search alone, the registered scripts, the unit tests. Each is a list of units.

A unit runs in a forked child, with or without a mutant, and says why it failed. It decides nothing about order or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import pytest

from scripted.adapters.lockstep.schedules import WORKLOADS
from scripted.search.strategies import Exhaustive
from scripted.search.targets import target_named

__all__ = ["PytestUnit", "SearchUnit", "Suite", "Unit", "with_units"]

_REGISTERED: Final = "tests/registered"
# These try mutants of their own; on top of another one they say nothing.
_LEFT_OUT: Final = "test_mutants.py"
# Tests with these ask processes of their own, in which no mutant is.
_OTHER_PROCESSES: Final = frozenset({"farm", "launch", "parent", "server"})
_PLUGINS_OFF: Final = ("terminal", "cacheprovider", "xdist", "hypothesispytest", "schemathesis", "anyio", "logging")

# What the search has imported already holds no tests.
_QUIET: Final = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


class Suite(StrEnum):
    """Who looks for mutants."""

    SEARCH = "search"
    REGISTERED = "registered"
    UNIT = "unit"


class SearchUnit:
    """A base workload by itself, or its sweep: all of it, or ``most`` schedules at even distances."""

    def __init__(self, workload: str, *, sweep: bool, most: int | None = None) -> None:
        self.suite = Suite.SEARCH
        self.name = f"{workload} {'sweep' if sweep else 'alone'}"
        self._workload = workload
        self._sweep = sweep
        self._most = most

    def run(self) -> str | None:
        """Up to the first failure; what the search says of it."""
        bench = target_named(self._workload)
        if bench.outcome.failure is not None:
            return str(bench.outcome.failure)
        if self._sweep:
            additions = list(Exhaustive().additions(self._workload, bench.base, bench.steps))
            apart = 1 if self._most is None else -(-len(additions) // self._most)
            for extra in additions[::apart]:
                failure = bench.execute(*extra).failure
                if failure is not None:
                    return f"{' + '.join(map(str, extra))}: {failure}"
        return None


class PytestUnit:
    """One collected test."""

    def __init__(self, suite: Suite, item: pytest.Item) -> None:
        self.suite = suite
        self.name = item.nodeid
        self._item = item

    def run(self) -> str | None:
        """Set up, call and tear down, as pytest does."""
        verdicts = _Verdicts()
        self._item.config.pluginmanager.register(verdicts)
        self._item.config.hook.pytest_runtest_protocol(item=self._item, nextitem=None)
        self._item.config.pluginmanager.unregister(verdicts)
        return verdicts.failure


Unit = SearchUnit | PytestUnit


class _Verdicts:
    def __init__(self) -> None:
        self.failure: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failure is None:
            lines = str(report.longrepr).strip().splitlines()
            self.failure = next((line for line in reversed(lines) if line.startswith("E ")), lines[-1] if lines else "")


def with_units(
    suites: Sequence[Suite],
    work: Callable[[list[Unit]], None],
    *,
    unit_tests: Sequence[str],
    most: int | None = None,
) -> None:
    """Collect the units of these suites, and do something with them while pytest's session is open.

    ``unit_tests`` are folders and files, ``most`` bounds the schedules of one sweep.
    """
    units: list[Unit] = []
    if Suite.SEARCH in suites:
        units += [SearchUnit(name, sweep=sweep, most=most) for sweep in (False, True) for name in WORKLOADS]
    folders = [_REGISTERED] * (Suite.REGISTERED in suites) + [*unit_tests] * (Suite.UNIT in suites)
    if not folders:
        work(units)
        return
    off = [argument for plugin in _PLUGINS_OFF for argument in ("-p", f"no:{plugin}")]
    session = _Session(units, work)
    status = pytest.main([*folders, "--tier", "sim", "-o", "addopts=", *_QUIET, *off], plugins=[session])
    if status is pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt  # pytest keeps it to itself.
    if status or not session.has_worked:
        raise RuntimeError(f"pytest could not collect {', '.join(folders)}: exit status {status}")


class _Session:
    """Instead of running the tests that pytest has collected."""

    def __init__(self, units: list[Unit], work: Callable[[list[Unit]], None]) -> None:
        self._units = units
        self._work = work
        self.has_worked = False

    def pytest_configure(self) -> None:
        # Not before pytest: it wants to rewrite what it imports. A test that fails under a mutant must leave no example
        # behind for the healthy engine, and the same tests must be the same in every child.
        import hypothesis

        hypothesis.settings.register_profile("mutation", database=None, derandomize=True, deadline=None)
        hypothesis.settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            if item.path.name != _LEFT_OUT and not _OTHER_PROCESSES & set(getattr(item, "fixturenames", ())):
                suite = Suite.REGISTERED if item.nodeid.startswith(_REGISTERED) else Suite.UNIT
                self._units.append(PytestUnit(suite, item))
        self._work(self._units)
        self.has_worked = True
        return True
