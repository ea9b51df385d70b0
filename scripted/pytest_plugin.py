"""The pytest plugin: an item per tier of a script, options, workers that share servers, and failure reports.

Registered by entry point, so every project in an environment loads it. It claims only functions decorated with
``@scripted``, and imports nothing else of the harness before a test needs it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from scripted.pytest_session import ScriptedSession
    from scripted.report.failure import FailureReport
    from scripted.script.execution import ScriptOutcome
    from scripted.script.harness import Harness
    from scripted.script.scripted_test import ScriptedTest
    from scripted.sdk.flight.of_tests import RecordedTests

__all__: list[str] = []

TIERS: Final = ("sim", "server")
PLACEMENTS: Final = ("local", "join", "ray")
_DECORATOR: Final = "scripted.script.decorator"
_TEST: Final = "scripted.script.scripted_test"
_DEADLINE: Final = "scripted.script.hard_deadline"
_OPTIONS: Final[dict[str, dict[str, object]]] = {
    "tier": {"choices": (*TIERS, "all"), "default": "all", "help": "run scripts in this tier only (default: all)"},
    "mutant": {"metavar": "NAME", "help": "switch a mutant of the adapter on; the tests that catch it go red"},
    "placement": {
        "choices": PLACEMENTS,
        "default": "local",
        "help": "where the stages of the server tier are: forked beside the scheduler, joined over TCP through a relay "
        "of the harness, placed by Ray (default: local, or as the script says)",
    },
    "invariants": {
        "choices": ("step", "end"),
        "help": "audit the engine's books after every step, or only at the end of a script (default: step; "
        "with a mutant: end, so that the failure looks as it did in the original engine)",
    },
    "vet": {
        "choices": ("off", "new", "all"),
        "default": "new",
        "help": "say which scripts notice no bug, and which assertions can never fail: of scripts that are new or have "
        "changed, for at most 20 s at the end; of all; or off (default: new)",
    },
    "record": {
        "metavar": "FOLDER",
        "help": "record the schedulers of vLLM or SGLang that tests start in this process, keep in FOLDER the flights "
        "of tests that fail, and say whether their failures replay",
    },
    "device": {
        "metavar": "DEVICE",
        "help": "where servers compute: cpu, cuda or cuda:N (default: as each test's configuration says)",
    },
}
_DEVICES: Final = re.compile(r"cpu|cuda(:\d+)?")
# The report property with the counts of a script's comparisons and leftovers. It travels from xdist's workers.
_RESULT: Final = "scripted"
_session: Final = pytest.StashKey["ScriptedSession"]()
# The process's own stderr: output that pytest captures is lost when the process ends.
_stderr: Final = pytest.StashKey[int]()
_recorded: Final = pytest.StashKey["RecordedTests"]()
# The report property of a failed test with the verdict of its flight's replay.
_FLIGHT: Final = "scripted-flight"
# The vetting verdicts on this session's scripts by name, with the digest of each file.
_verdicts: Final = pytest.StashKey[dict[str, tuple[str, dict[str, int]]]]()
_VETTED: Final = "scripted/vetted"
_RAN: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
# The options whose short names belong to the project.
_without_short_name: Final = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the harness's options under its own prefix."""
    group = parser.getgroup("scripted", "scripted races (each option also has a short name, --tier, if that is free)")
    for name, option in _OPTIONS.items():
        group.addoption(f"--scripted-{name}", dest=_destination(name), **option)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None, None, None]:
    """Add the short names, ``--tier`` and so on, unless the project has options with these names."""
    yield
    group = parser.getgroup("scripted")
    early_config.stash[_without_short_name] = frozenset(f"--{name}" for name in _OPTIONS) & _names_of(parser)
    for name, option in _OPTIONS.items():
        if f"--{name}" not in early_config.stash[_without_short_name]:
            group.addoption(f"--{name}", dest=_destination(name), **option | {"help": f"short for --scripted-{name}"})


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Raise UsageError for an invalid device."""
    device = _option(config, "device")
    if device is not None and not _DEVICES.fullmatch(device):
        raise pytest.UsageError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    config.stash[_stderr] = os.dup(2)
    if (folder := _option(config, "record")) is not None:
        from scripted.sdk.flight.of_tests import RecordedTests

        config.stash[_recorded] = RecordedTests(Path(folder))
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests of one group stay on one worker")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Vet the passed scripts after all tests have run: a script with a bug leaves other values behind than without."""
    config = session.config
    vet, mutant = _option(config, "vet"), _option(config, "mutant")
    if _session not in config.stash or vet == "off" or mutant is not None or exitstatus not in _RAN:
        return
    verdicts = config.stash[_session].vet({} if vet == "all" else _known_verdicts(config), is_whole=vet == "all")
    output: dict[str, object] = getattr(config, "workeroutput", {})
    output[_VETTED] = config.stash[_verdicts] = verdicts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the verdicts of an xdist worker."""
    config, output = node.config, getattr(node, "workeroutput", {})
    config.stash.setdefault(_verdicts, {}).update(output.get(_VETTED, {}))


def _known_verdicts(config: pytest.Config) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the verdicts of earlier sessions; none from a cache with other contents."""
    import msgspec

    cache = getattr(config, "cache", None)
    try:
        return msgspec.convert({} if cache is None else cache.get(_VETTED, {}), dict[str, tuple[str, dict[str, int]]])
    except msgspec.ValidationError:
        return {}


def pytest_unconfigure(config: pytest.Config) -> None:
    if _session in config.stash:
        config.stash[_session].close()
    if (loaded := sys.modules.get(_DEADLINE)) is not None:
        loaded.write_stacks_to()
    if _stderr in config.stash:
        os.close(config.stash[_stderr])
    if _recorded in config.stash:
        config.stash[_recorded].close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for each tier of each scripted test."""
    wanted = _option(metafunc.config, "tier")
    test = _scripted_test(metafunc.function)
    if test is not None:
        _session_of(metafunc.config)
        tiers = [tier for tier in test.tiers if wanted in (tier, "all")]
        metafunc.parametrize(sys.modules[_DECORATOR].TIER_PARAMETER, _offered(tiers, wanted, test.adapter))
    elif _takes_our_harness(metafunc):
        metafunc.parametrize("harness", [tier for tier in TIERS if wanted in (tier, "all")], indirect=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[Harness[object, ScriptOutcome]]]:
    """``harness(config, mutant=None)`` lends an engine in each tier in turn, for tests that run scripts by hand."""
    tier: str = request.param
    session, wanted = _session_of(request.config), _option(request.config, "tier")

    def lend(config: object, **how: Any) -> AbstractContextManager[Harness[object, ScriptOutcome]]:
        from scripted.core.adapters import adapter_for

        if tier == "server" and wanted == "all" and (why := _why_no_servers(how.get("adapter") or adapter_for(config))):
            pytest.skip(why)
        return session.harness(config, tier, **how)

    return lend


@pytest.hookimpl(wrapper=True)  # before xdist's worker, which reads the groups, and after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Drop items without a tier; keep the tests of one configuration on one worker, where they share a server."""
    _check_mutant(config, items)
    wanted = _option(config, "tier")
    dropped = []
    groups: dict[pytest.Item, str] = {}
    for item in items:
        test = _test_of(item)
        if test is not None and wanted != "all" and wanted not in test.tiers:
            dropped.append(item)
        elif (group := _group_of(item, test)) is not None:
            groups[item] = group
            item.add_marker(pytest.mark.xdist_group(group))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    result = yield
    if config.getoption("loadgroup", False):
        for item, group in groups.items():
            _show_group(item, group)
    return result


def _show_group(item: pytest.Item, group: str) -> None:
    """Append the group to an item's id, which xdist schedules by.

    xdist 3.8 sets an attribute that pytest has not read since 9.2, and would spread the group over all workers.
    """
    if "@" in item.nodeid.rpartition("]")[2]:
        return
    # Pytest has no public way to change an id. If a version keeps it elsewhere, the tests are spread.
    with suppress(AttributeError):
        kind = type(item._id)  # noqa: SLF001
        item._id = kind.parse(f"{item.nodeid}@{group}")  # noqa: SLF001


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Warn about a script that pytest leaves out because of its name or its class's name: it never runs.

    A class from which a collected one inherits is not left out.
    """
    if isinstance(obj, type) and not collector.classnamefilter(name):
        beside = [one for other, one in vars(collector.obj).items() if collector.classnamefilter(other)]
        is_inherited = any(isinstance(one, type) and issubclass(one, obj) for one in beside)
        scripts = (
            []
            if is_inherited
            else [f"{name}.{part}" for part, value in vars(obj).items() if _scripted_test(value) is not None]
        )
    else:
        module = collector.getparent(pytest.Module)
        is_here = module is not None and getattr(obj, "__module__", None) == module.obj.__name__
        is_left_out = is_here and _scripted_test(obj) is not None and not collector.funcnamefilter(name)
        scripts = [name] if is_left_out else []
    for script in scripts:
        collector.warn(
            pytest.PytestCollectionWarning(
                f"{script} is decorated with @scripted and never runs, because pytest collects functions named test_* "
                "and classes named Test*; rename it, or leave the decorator out"
            )
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tell the session which test runs, for its replay command, and where to write stacks past pytest's capture."""
    if _session in item.config.stash:
        item.config.stash[_session].node_id = _node_id(item)
    if (loaded := sys.modules.get(_DEADLINE)) is not None:
        loaded.write_stacks_to(item.config.stash[_stderr])
    recorded = item.config.stash.get(_recorded, None)
    if recorded is None:
        return (yield)
    recorded.begin()
    try:
        return (yield)
    finally:
        recorded.end()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test whose script called ``pytest.skip()`` in another process, and likewise for ``pytest.xfail()``."""
    __tracebackhide__ = True
    try:
        return (yield)
    except Exception as exc:
        script_report = _report_of(exc)
        if script_report is None or script_report.ending is None:
            raise
        outcome = pytest.skip if script_report.ending.kind == "skip" else pytest.xfail
        raise outcome.Exception(script_report.ending.reason) from exc


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[object]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a script's own report instead of a traceback through the harness; count its comparisons and leftovers."""
    with _postponed_finalizers():
        report = yield
    if report.failed and _recorded in item.config.stash:
        _report_flights(item, report)
    if _session not in item.config.stash:
        return report
    if report.when == "call" and (counts := item.config.stash[_session].take_counts()):
        report.user_properties.append((_RESULT, counts))
    if call.excinfo is not None and isinstance(report.longrepr, tuple):
        script_report = _report_of(call.excinfo.value.__cause__)
        if script_report is not None and script_report.frames:
            report.longrepr = (script_report.frames[-1].file, script_report.frames[-1].line, report.longrepr[2])
    if call.excinfo is not None and report.failed:
        from scripted.core.errors import BadCall
        from scripted.core.refusals import ScriptDefinitionError
        from scripted.report.failure import ScriptError

        error, test = call.excinfo.value, _test_of(item)
        if isinstance(error, ScriptError):
            report.longrepr = _script_report(call.excinfo, error.report, item.config)
        elif test is not None and report.when == "call" and isinstance(error, (BadCall, ScriptDefinitionError)):
            report.longrepr = _refused(call.excinfo, item)
    return report


def _report_flights(item: pytest.Item, report: pytest.TestReport) -> None:
    """Keep the flights of a failed test, and say in its report whether they replay."""
    from scripted.sdk.flight.of_tests import lines_of

    recorded: RecordedTests = item.config.stash[_recorded]
    for path, verdict in recorded.failed(item.nodeid):
        report.sections.append(("flight recorder", "\n".join(lines_of(path, verdict))))
        report.user_properties.append((_FLIGHT, verdict.text))


def _report_of(exc: BaseException | None) -> FailureReport | None:
    """Return the report of a script that did not pass; None for any other exception. Loads nothing."""
    kind = getattr(sys.modules.get("scripted.report.failure"), "ScriptError", None)
    return exc.report if kind is not None and isinstance(exc, kind) else None


@contextmanager
def _postponed_finalizers() -> Iterator[None]:
    """Keep the garbage collector from running finalizers of an earlier script.

    If one raises, Python 3.11 parses source to print its traceback. While the source of a report is being parsed, that
    is a SystemError, which would end the session.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _script_report(failure: pytest.ExceptionInfo[BaseException], report: FailureReport, config: pytest.Config) -> Any:
    """Show the script's report in place of a traceback, and its first line where pytest shows a failure in one line."""
    terminal = config.get_terminal_writer().fullwidth if sys.stdout.isatty() else None
    at = (report.frames[-1].file, report.frames[-1].line) if report.frames else None
    return _replacement(failure, report.render(terminal).splitlines(), report.headline, at)


def _refused(failure: pytest.ExceptionInfo[BaseException], item: pytest.Item) -> Any:
    """Report a refusal before the script began at the test, since the harness's own lines explain nothing."""
    path, line, _ = item.location
    text = f"{type(failure.value).__name__}: {failure.value}"
    return _replacement(failure, [f"{path}: in {item.name}", f"E       {text}"], text, (path, (line or 0) + 1))


def _replacement(
    failure: pytest.ExceptionInfo[BaseException], lines: list[str], headline: str, at: tuple[str, int] | None
) -> Any:
    shown: Any = failure.getrepr(style="value", chain=False)
    shown.reprtraceback.reprentries[0].lines = lines
    if shown.reprcrash is not None:
        shown.reprcrash.message = headline
        if at is not None:
            shown.reprcrash.path, shown.reprcrash.lineno = at
    return shown


def _node_id(item: pytest.Item) -> str:
    """Return a test's id relative to the folder in which pytest was called, without the group that xdist adds."""
    _, _, inside = str(item.nodeid).partition("::")
    above, _, _ = inside.rpartition(item.name)
    return f"{os.path.relpath(item.path, item.config.invocation_params.dir)}::{above}{item.name}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the comparisons and leftovers of the passed scripts, and which failures replay."""
    _summarize_flights(terminalreporter)
    passed = [
        (report.nodeid, counts)
        for report in terminalreporter.stats.get("passed", ())
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, counts in report.user_properties
        if name == _RESULT and isinstance(counts, dict)
    ]
    if not passed:
        return
    from scripted.report.tally import SummaryOfScripts

    tally = SummaryOfScripts()
    for test, counts in passed:
        tally.add(test, counts)
    config = terminalreporter.config
    if verdicts := config.stash.get(_verdicts, {}):
        for name, (_, faults) in verdicts.items():
            tally.add_counts(name, faults)
        if getattr(config, "cache", None) is not None:
            config.cache.set(_VETTED, _known_verdicts(config) | verdicts)
    terminalreporter.section("scripts", "-")
    for line in tally.lines(verbose=terminalreporter.verbosity > 0):
        terminalreporter.line(line)


def _summarize_flights(terminalreporter: pytest.TerminalReporter) -> None:
    verdicts = [
        (report.nodeid, text)
        for kind in ("failed", "error")
        for report in terminalreporter.stats.get(kind, ())
        if isinstance(report, pytest.TestReport)
        for name, text in report.user_properties
        if name == _FLIGHT
    ]
    if verdicts:
        terminalreporter.section("recorded failures", "-")
    for nodeid, text in verdicts:
        terminalreporter.line(f"{nodeid}: {text}")


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[object]) -> None:
    """Let ``--pdb`` stop in the script. In the server tier the script ran in another process, and is gone."""
    if call.excinfo is None or not node.config.getoption("usepdb", False):
        return
    error = call.excinfo.value
    cause = error.__cause__
    test = _test_of(node)
    traceback = None if test is None or cause is None else _ending_in(cause.__traceback__, test.file)
    if cause is not None and traceback is not None:
        call.excinfo = pytest.ExceptionInfo.from_exc_info((type(cause), cause, traceback))
    elif test is not None and "server" in test.tiers:
        print("--pdb: the script ran in the server's scheduler process; run it with --tier sim to stop in it")  # noqa: T201


def _ending_in(traceback: TracebackType | None, file: str) -> TracebackType | None:
    """Copy a traceback up to its last frame in this file, where a debugger then starts."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    while frames and frames[-1].tb_frame.f_code.co_filename != file:
        frames.pop()
    ended = None
    for one in reversed(frames):
        ended = TracebackType(ended, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return ended


def _destination(name: str) -> str:
    return f"scripted_{name}"


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(_destination(name))


def _names_of(parser: pytest.Parser) -> set[str]:
    """Return every option of pytest, its plugins and the project's own conftest."""
    groups = [*parser._groups, parser._anonymous]  # noqa: SLF001 - pytest has no public list of its options
    return {name for group in groups for option in group.options for name in option.names()}


def _test_of(item: pytest.Item) -> ScriptedTest | None:
    return _scripted_test(item.function) if isinstance(item, pytest.Function) else None


def _scripted_test(function: object) -> ScriptedTest | None:
    """Return the test that ``@scripted`` made from a function; None for any other. Imports nothing."""
    spec = getattr(function, "scripted", None)
    kind = getattr(sys.modules.get(_TEST), "ScriptedTest", None) if spec is not None else None
    return spec if kind is not None and isinstance(spec, kind) else None


def _offered(tiers: list[str], wanted: str, adapter: str) -> list[object]:
    """Return the tiers; if servers cannot be started and nobody asked for them by name, the server tier is skipped."""
    if wanted == "server" or "server" not in tiers or not (why := _why_no_servers(adapter)):
        return list(tiers)
    skip = pytest.mark.skip(reason=why)
    return [pytest.param(tier, marks=skip) if tier == "server" else tier for tier in tiers]


def _why_no_servers(adapter: str) -> str:
    from scripted.core.adapters import adapter_named
    from scripted.script.harness import HasServers

    known = adapter_named(adapter)
    return known.why_no_servers() if isinstance(known, HasServers) else f"the adapter {adapter} has no server tier"


def _takes_our_harness(metafunc: pytest.Metafunc) -> bool:
    """Whether ``harness`` is this file's fixture, and not one that the project defines itself."""
    if "harness" not in metafunc.fixturenames:
        return False
    definitions = metafunc._arg2fixturedefs.get("harness", ())  # noqa: SLF001 - pytest has no public way to ask
    return bool(definitions) and definitions[-1].func.__module__ == __name__


def _session_of(config: pytest.Config) -> ScriptedSession:
    """Return the scripted tests of this pytest process, set up when the first one is collected."""
    if _session not in config.stash:
        from scripted.pytest_session import ScriptedSession, set_session

        mutant = _option(config, "mutant")
        invariants = _option(config, "invariants") or ("end" if mutant else "step")
        long_options = config.stash.get(_without_short_name, frozenset[str]())
        session = ScriptedSession(
            mutant=mutant,
            every_step=invariants == "step",
            device=_option(config, "device"),
            placement=_option(config, "placement"),
            long_options=long_options,
            isolates=not (config.getoption("usepdb", False) or config.getoption("trace", False)),
        )
        set_session(session)
        config.stash[_session] = session
    return config.stash[_session]


def _check_mutant(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise UsageError for a mutant that no adapter of a collected script knows.

    An xdist worker cannot refuse to run; there the scripts fail with the same message.
    """
    mutant = _option(config, "mutant")
    if mutant is None:
        return
    from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
    from scripted.core.mutant import refusal_of_mutant

    tests = [test for item in items if (test := _test_of(item)) is not None]
    adapters = sorted({test.adapter for test in tests} or {DEFAULT_ADAPTER})
    refusals = [refusal_of_mutant(adapter_named(name), mutant) for name in adapters]
    if None in refusals:
        return
    refusal = f"--mutant: {'; '.join(filter(None, refusals))}"
    if not hasattr(config, "workerinput"):
        raise pytest.UsageError(refusal)
    _session_of(config).refusal = refusal


def _group_of(item: pytest.Item, test: ScriptedTest | None) -> str | None:
    """Name the group of items that may share a server, by configuration or, if the test chooses it, by file.

    None in sim.
    """
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if parameters.get("harness" if test is None else sys.modules[_DECORATOR].TIER_PARAMETER) != "server":
        return None
    words = str(item.path) if test is None else f"{test.adapter} {test.config!r} {test.placement}"
    return "scripted-" + hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
