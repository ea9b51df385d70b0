"""The pytest plugin: one test item a tier, options, servers grouped on workers, and the report of a failing script.

Registered by entry point, so that any repository that installs the harness has it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from scripted.errors import ScriptError
from scripted.pytest_session import ScriptedSession, current_session, set_session
from scripted.report.tally import SummaryOfScripts
from scripted.script.decorator import TIER_PARAMETER, TIERS, ScriptedTest

__all__: list[str] = []

# The property of a test's report that has what its script compared and left.
RESULT = "scripted"

Harness = Callable[..., AbstractContextManager[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the harness's options."""
    group = parser.getgroup("scripted", "scripted races")
    group.addoption(
        "--tier", choices=(*TIERS, "all"), default="all", help="run scripts in this tier only (default: all)"
    )
    group.addoption("--mutant", metavar="NAME", help="switch a bug of the gallery on; the tests that catch it go red")
    group.addoption(
        "--invariants",
        choices=("step", "end"),
        help="audit the engine's books after every step, or only at the end of a script (default: step; "
        "with --mutant: end, so that the failure looks as it did in the original engine)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and start the session."""
    mutant = config.getoption("--mutant")
    if mutant is not None:
        from scripted.gallery import UnknownMutant, mutant_named

        try:
            mutant_named(mutant)
        except UnknownMutant as exc:
            raise pytest.UsageError(f"--mutant: {exc}") from exc
    invariants = config.getoption("--invariants") or ("end" if mutant else "step")
    set_session(ScriptedSession(mutant=mutant, every_step=invariants == "step"))
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests of one group stay on one worker")


def pytest_unconfigure() -> None:
    """Leave no server behind."""
    current_session().close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item a tier of each scripted test."""
    wanted = metafunc.config.getoption("--tier")
    test = getattr(metafunc.function, "scripted", None)
    if isinstance(test, ScriptedTest):
        metafunc.parametrize(TIER_PARAMETER, [tier for tier in test.tiers if wanted in (tier, "all")])
    elif "harness" in metafunc.fixturenames:
        metafunc.parametrize("harness", [tier for tier in TIERS if wanted in (tier, "all")], indirect=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Harness:
    """``harness(config, mutant=None)`` lends an engine of each tier in turn, for tests that run scripts by hand."""
    tier: str = request.param
    return functools.partial(current_session().harness, tier=tier)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop items without a tier; keep the tests of one configuration on one worker, where they share a server."""
    wanted = config.getoption("--tier")
    dropped = []
    for item in items:
        test = getattr(getattr(item, "function", None), "scripted", None)
        if not isinstance(test, ScriptedTest):
            continue
        if wanted != "all" and wanted not in test.tiers:
            dropped.append(item)
        else:
            item.add_marker(pytest.mark.xdist_group(_group_of(test)))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tell the session which test runs, for its replay command."""
    session = current_session()
    session.node_id, session.ended = item.nodeid, None
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a script's own report instead of a traceback through the harness."""
    ended = current_session().ended
    if call.when == "call" and ended is not None:
        item.user_properties.append((RESULT, ended.counts()))
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, ScriptError) and report.failed:
        report.longrepr = call.excinfo.value.report.render()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the scripts that passed have compared, and what they have left that may be a mistake."""
    tally = SummaryOfScripts()
    for report in terminalreporter.stats.get("passed", ()):
        for name, counts in getattr(report, "user_properties", ()):
            if name == RESULT and getattr(report, "when", "") == "call":
                tally.add(report.nodeid, counts)
    if tally.scripts:
        terminalreporter.section("scripts", "-")
        for line in tally.lines(verbose=terminalreporter.verbosity > 0):
            terminalreporter.line(line)


def _group_of(test: ScriptedTest) -> str:
    return "scripted-" + hashlib.blake2b(test.config.model_dump_json().encode(), digest_size=6).hexdigest()
