"""Runs a test's script in a forked child, so that nothing it does to its process reaches other scripts.

The child sends back the result or the failure's report, and everything that a test runner captures: output, log
records, warnings. A script that exceeds its time is killed, even if it catches every exception or is inside a C call.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import linecache
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from scripted.core.errors import BadCall
from scripted.core.phrases import text_of
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.report.failure import Activity, FailureKind, FailureReport, ProcessStack, ScriptError, error_of
from scripted.report.frames import Frame, definition_of
from scripted.script import run as script_run
from scripted.script.child import ChildDied, ChildLate, run_in_child
from scripted.script.measure import count_assertions
from scripted.script.options import ScriptOptions
from scripted.script.scripted_test import ScriptedTest
from scripted.script.source import code_of

if TYPE_CHECKING:
    from scripted.script.execution import ScriptOutcome

_OutcomeT = TypeVar("_OutcomeT", bound="ScriptOutcome")
# More than the watchdog gets in the child, because the watchdog's report has the last steps.
_PATIENCE_S: Final = 1.0
_LINE: Final = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)
# The first line of the harness below the script's lines in a stack.
_HARNESS: Final = f'File "{script_run.__file__}"'
# Exceptions of a run other than the script's failure; any exception beyond these is a defect of the harness.
_REFUSALS: Final = {kind.__name__: kind for kind in (ScriptDefinitionError, BadCall, HarnessError)}


class Logged(msgspec.Struct, frozen=True):
    """A log record from the child."""

    logger: str
    level: int
    text: str
    file: str
    line: int
    function: str


class Warned(msgspec.Struct, frozen=True):
    """A warning from the child, or an exception that nothing could catch."""

    category: str
    text: str
    file: str
    line: int


class _Passed(msgspec.Struct, frozen=True, tag=True):
    counts: dict[str, int]
    # The encoded outcome, if the caller wants it.
    outcome: bytes = b""


class _Failed(msgspec.Struct, frozen=True, tag=True):
    report: FailureReport


class _Refused(msgspec.Struct, frozen=True, tag=True):
    """The run raised an exception that is not a failure of the script."""

    kind: str
    text: str
    traceback: str


class _Ended(msgspec.Struct, frozen=True):
    how: _Passed | _Failed | _Refused
    printed: tuple[str, str]
    logged: tuple[Logged, ...]
    warned: tuple[Warned, ...]


_decoder: Final = msgspec.msgpack.Decoder(_Ended)


def run_isolated(test: ScriptedTest, options: ScriptOptions, run: Callable[[], ScriptOutcome]) -> dict[str, int]:
    """Run a script in a child by ``run()``, and return the counts of its outcome. Raises ScriptError as ``run`` does.

    A script that ends its process, or does not end in time, fails too.
    """
    __tracebackhide__ = True
    return _isolated(test, options, lambda: _Passed(run().counts())).counts


def outcome_isolated(
    test: ScriptedTest, options: ScriptOptions, run: Callable[[], _OutcomeT], kind: type[_OutcomeT]
) -> _OutcomeT:
    """Do the same, and return the outcome, of this ``kind``."""
    __tracebackhide__ = True
    passed = _isolated(test, options, lambda: _Passed({}, msgspec.msgpack.encode(run())))
    return msgspec.msgpack.decode(passed.outcome, type=kind)


def _isolated(test: ScriptedTest, options: ScriptOptions, run: Callable[[], _Passed]) -> _Passed:
    __tracebackhide__ = True
    if options.must_assert:
        count_assertions(test.script)  # once here, not in every child
    try:
        encoded = run_in_child(lambda: _encoded(run), options.timeout_s + _PATIENCE_S)
    except ChildLate as late:
        raise error_of(_late_report(test, options, late.stacks)) from None
    except ChildDied as died:
        error = f"the script's process {died} before the script had ended; leave the process to the harness"
        raise error_of(_report(test, options, FailureKind.FAILED, error, definition_of(code_of(test.script)))) from None
    ended = _decoder.decode(encoded)
    _replay(ended)
    match ended.how:
        case _Passed():
            return ended.how
        case _Failed(report):
            raise error_of(report)
        case _Refused(kind, text, where):
            if kind in _REFUSALS:
                raise _REFUSALS[kind](text)
            raise HarnessError(f"the run of the script raised {kind}: {text}\n{where}")


def _late_report(test: ScriptedTest, options: ScriptOptions, stacks: str) -> FailureReport:
    """Report a killed script by the stacks of its process."""
    code = code_of(test.script)
    frames = tuple(
        Frame(file, int(line), name, linecache.getline(file, int(line)).strip())
        for file, line, name in reversed(_LINE.findall(stacks))
        if file == code.co_filename
    )
    error = (
        f"the script did not end within timeout_s={options.timeout_s:g}, and was killed: it caught or switched off "
        "what ends it, or did not return from a C call"
    )
    report = _report(test, options, FailureKind.TIMEOUT, error, frames or definition_of(code))
    own = stacks.partition(_HARNESS)[0].rpartition("\n")[0]
    return msgspec.structs.replace(report, stacks=(ProcessStack("script", own, Activity.COMPUTES),) if own else ())


def _report(
    test: ScriptedTest, options: ScriptOptions, kind: FailureKind, error: str, frames: tuple[Frame, ...]
) -> FailureReport:
    code = code_of(test.script)
    return FailureReport(
        kind=kind,
        error=error,
        frames=frames,
        script=f"{code.co_filename}::{test.script.__name__}",
        adapter=test.adapter,
        tier="sim",
        replay=options.replay,
    )


def _replay(ended: _Ended) -> None:
    """Repeat the child's output, log records and warnings in this process."""
    for stream, text in zip((sys.stdout, sys.stderr), ended.printed, strict=True):
        if text and stream is not None:
            stream.write(text)
    for one in ended.logged:
        logger = logging.getLogger(one.logger)
        if logger.isEnabledFor(one.level):
            record = logger.makeRecord(one.logger, one.level, one.file, one.line, one.text, (), None, one.function)
            logger.handle(record)
    for warned in ended.warned:
        warnings.warn_explicit(warned.text, _category(warned.category), warned.file, warned.line)


def _category(name: str) -> type[Warning]:
    """Find the class of a warning; UserWarning if this process cannot import it."""
    module, _, kind = name.rpartition(".")
    with contextlib.suppress(ImportError):
        found = getattr(importlib.import_module(module or builtins.__name__), kind, None)
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return UserWarning


# -- in the child --


def _encoded(run: Callable[[], _Passed]) -> bytes:
    with _captured() as captured:
        result = _result_of(run)
    return msgspec.msgpack.encode(captured(result))


def _result_of(run: Callable[[], _Passed]) -> _Passed | _Failed | _Refused:
    try:
        return run()
    except ScriptError as exc:
        return _Failed(exc.report)
    except Exception as exc:  # noqa: BLE001 - the parent raises it
        return _Refused(type(exc).__name__, text_of(exc), traceback.format_exc())


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[_Passed | _Failed | _Refused], _Ended]]:
    """Capture output, log records and warnings, which would never reach the parent's handlers."""
    streams = [stream if _is_file(stream) else io.StringIO() for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = streams
    kept = _Kept()
    logging.root.handlers[:] = [kept]
    raised: list[Warned] = []

    def note(lost: Any) -> None:
        raised.append(_lost(lost.exc_type, lost.exc_traceback))

    sys.unraisablehook = threading.excepthook = note
    with warnings.catch_warnings(record=True) as caught:

        def ended(how: _Passed | _Failed | _Refused) -> _Ended:
            warned = [Warned(_name_of(one.category), str(one.message), one.filename, one.lineno) for one in caught]
            printed = [stream.getvalue() if isinstance(stream, io.StringIO) else "" for stream in streams]
            return _Ended(how, (printed[0], printed[1]), tuple(kept.records), (*warned, *raised))

        yield ended


def _lost(kind: type[BaseException], where: Any) -> Warned:
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    code = None if where is None else where.tb_frame.f_code
    file, line, name = ("", 0, "code") if code is None else (code.co_filename, where.tb_lineno, code.co_qualname)
    return Warned("RuntimeWarning", f"{name} raised {kind.__name__} where nothing can catch it", file, line)


def _is_file(stream: Any) -> bool:
    """Return whether a stream is a file that both processes write to, as in pytest's capture of descriptors."""
    try:
        return stream is not None and stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def _name_of(category: type[Warning]) -> str:
    return f"{category.__module__}.{category.__qualname__}"


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Logged] = []

    def emit(self, record: logging.LogRecord) -> None:
        function = record.funcName or ""
        text = record.getMessage()
        self.records.append(Logged(record.name, record.levelno, text, record.pathname, record.lineno, function))
