"""Formats a script's own exceptions for reports, with remedies, and turns BaseExceptions into failures.

It does not touch the engine.
"""

from __future__ import annotations

import bdb
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from scripted.core.errors import BadCall, MeantForTheScript
from scripted.core.phrases import nearest, text_of
from scripted.report.failure import Ending
from scripted.report.frames import left_by_stop_iteration
from scripted.script.handles import BaseRequest
from scripted.script.watchdog import Struck

_NOT_CALLABLE: Final = re.compile(r"'\w+' object is not callable")
_ASYNC: Final = re.compile(r"\b(async_generator|coroutine)\b")
# How many exceptions of a chain are named.
_MOST_BEFORE: Final = 3
# In pytest's notation of an explanation.
_NEXT_LINE: Final = "\n~"
_NESTED: Final = "\n{"
_DEBUG_REMEDY: Final = "run the script with pytest --tier sim -s, or step through it with scripted shell"


class Verdict(MeantForTheScript):
    """A script has called ``pytest.fail()``, ``pytest.skip()`` or ``pytest.xfail()``.

    ``pytest.raises`` fails in this way if nothing was raised. ``ending`` is None for a failure.
    """

    def __init__(self, exc: BaseException, ending: Ending | None) -> None:
        super().__init__(f"{type(exc).__name__}: {text_of(exc)}")
        self.ending = ending


class Departure(BadCall):
    """A BaseException such as SystemExit left the script, which therefore neither passed nor failed."""

    def __init__(self, exc: BaseException) -> None:
        super().__init__(
            f"the script was left by {type(exc).__name__}({text_of(exc)!r}), which decides nothing; use an assertion "
            "to fail, return to end, and pytest.skip() to skip"
        )


def error_text(exc: BaseException, script: object = None, handles: Sequence[BaseRequest] = ()) -> str:
    """Format an exception as pytest does: an assertion by its introspected text, any other by type and text.

    If the scheduler's object lacks an attribute that one of the ``handles`` has, a remedy names it. Further lines show
    the exceptions of a group, and exceptions that were the cause or being handled.
    """
    text = text_of(exc)
    if type(exc) not in (AssertionError, Verdict) or not text:
        text = f"{type(exc).__name__}: {text}".removesuffix(": ") + _remedy(exc, script, handles)
    return "\n".join([text, *_grouped(exc), *_before(exc)])


class no_departure:  # noqa: N801 - a context manager that is read as a phrase
    """Fail a script that a BaseException leaves; only the user's interrupt ends the run itself."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        if exc is not None and not isinstance(exc, (Exception, KeyboardInterrupt, Struck)):
            raise (_verdict_of(exc) or Departure(exc)).with_traceback(exc.__traceback__) from exc


def _verdict_of(exc: BaseException) -> Verdict | None:
    """Return the verdict of a pytest call; None for any other exception. In a server, only scripts load pytest."""
    pytest = sys.modules.get("pytest")
    if pytest is None:
        return None
    if isinstance(exc, pytest.skip.Exception):
        return Verdict(exc, Ending("skip", text_of(exc)))
    if isinstance(exc, pytest.xfail.Exception):
        return Verdict(exc, Ending("xfail", text_of(exc)))
    return Verdict(exc, None) if isinstance(exc, pytest.fail.Exception) else None


@contextlib.contextmanager
def with_origins() -> Iterator[None]:
    """Show the origins of both sides of a failed comparison beside pytest's diff.

    A server has no test runner to make a diff, and shows only the origins.
    """
    rewrite: Any = sys.modules.get("_pytest.assertion.rewrite")
    explain = getattr(rewrite, "_call_reprcompare", None)
    if rewrite is None or explain is None:
        yield
        return

    def explain_both(ops: Sequence[str], results: Sequence[object], origins: Sequence[str], *sides: object) -> str:
        explained: str = explain(ops, results, origins, *sides)
        _, line, difference = explained.partition(_NEXT_LINE)
        has_origin = len(origins) == 1 and _NESTED in origins[0]
        return f"{origins[0]}{line}{difference}" if has_origin and line else explained

    rewrite._call_reprcompare = explain_both  # noqa: SLF001 - rewritten assertions call it
    try:
        yield
    finally:
        rewrite._call_reprcompare = explain  # noqa: SLF001


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """Refuse ``breakpoint()``, with the remedy, in a process without a terminal."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BadCall(f"breakpoint() needs a terminal, and the scheduler's process has none; {_DEBUG_REMEDY}")

    before, sys.breakpointhook = sys.breakpointhook, refuse
    try:
        yield
    finally:
        sys.breakpointhook = before


def _grouped(exc: BaseException, indent: str = "  ") -> Iterator[str]:
    if isinstance(exc, BaseExceptionGroup):
        for one in exc.exceptions:
            yield f"{indent}{_headline(one)}"
            yield from _grouped(one, f"{indent}  ")


def _before(exc: BaseException) -> Iterator[str]:
    """Describe the exceptions that a failure in an ``except`` or a ``finally`` would otherwise hide."""
    seen = {id(exc)}
    while len(seen) <= _MOST_BEFORE:
        cause = None if isinstance(exc, MeantForTheScript) else exc.__cause__
        before = cause or (None if exc.__suppress_context__ else exc.__context__)
        if before is None or id(before) in seen:
            return
        yield f"{'because of' if cause is not None else 'while it handled'} {_headline(before)}"
        seen.add(id(before))
        exc = before


def _headline(exc: BaseException) -> str:
    first = text_of(exc).partition("\n")[0]
    return f"{type(exc).__name__}: {first}".removesuffix(": ")


def _remedy(exc: BaseException, script: object, handles: Sequence[BaseRequest]) -> str:
    """Return a remedy that the text of a Python error lacks, such as the nearest existing name."""
    if isinstance(exc, bdb.BdbQuit):
        return f"the debugger was left, or had no terminal; {_DEBUG_REMEDY}"
    if type(exc) is AttributeError and exc.obj is not None and exc.obj is getattr(script, "__self__", None):
        return "; a method runs on a new object, which no fixture, setup method or __init__ has touched"
    if type(exc) is AttributeError and _is_of_a_handle(exc, handles):
        return nearest(f"r.{exc.name}", [f"r.{exc.name}"])
    if type(exc) is AttributeError and exc.name is not None:
        fields = f"; it has {', '.join(exc.obj.__struct_fields__)}" if isinstance(exc.obj, msgspec.Struct) else ""
        return nearest(exc.name, (name for name in dir(exc.obj) if not name.startswith("_"))) + fields
    if type(exc) is TypeError and _NOT_CALLABLE.fullmatch(str(exc)):
        return "; it is a value and not a method: leave the parentheses out"
    if type(exc) is TypeError and _ASYNC.search(str(exc)):
        return "; nothing awaits in a script: write the helper without async, as a generator, and 'yield from' it"
    if left_by_stop_iteration(exc):
        return "; next() found nothing: give it a default, or assert first that there is something"
    return ""


def _is_of_a_handle(exc: AttributeError, handles: Sequence[BaseRequest]) -> bool:
    """Return whether ``r.req``, which is None outside its life, was asked for an attribute of the handle ``r``."""
    asked = exc.obj is None or any(type(handle.req) is type(exc.obj) for handle in handles)
    return asked and exc.name is not None and any(hasattr(handle, exc.name) for handle in handles)
