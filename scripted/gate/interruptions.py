"""How a script's own exception is reported: its text with the nearest name, and what is no ordinary exception.

Changes nothing in the engine.
"""

from __future__ import annotations

import bdb
import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from scripted.errors import BadCall
from scripted.phrases import nearest

__all__ = ["Departure", "error_text", "without_debugger"]

_UNKNOWN_ARGUMENT: Final = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_DEBUG_REMEDY: Final = "run the script with pytest --tier sim -s, or step through it with scripted shell"


class Departure(BadCall):
    """A script was left by what is no Exception, such as pytest.skip() or exit(), and so neither passed nor failed."""

    def __init__(self, exc: BaseException) -> None:
        super().__init__(
            f"the script was left by {type(exc).__name__}({str(exc)!r}), which decides nothing; use an assertion to "
            "fail, return to end, and pytest's marks to skip"
        )


def error_text(exc: BaseException, context: type[object]) -> str:
    """The exception as pytest shows it: an assertion by its introspected text, all else by type and text.

    ``context`` is the class of ``t``, whose methods the script called.
    """
    if type(exc) is AssertionError and str(exc):
        return str(exc)
    return f"{type(exc).__name__}: {exc}".removesuffix(": ") + _remedy(exc, context)


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """A process without a terminal refuses ``breakpoint()``, with the remedy."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BadCall(f"breakpoint() needs a terminal, and the scheduler's process has none; {_DEBUG_REMEDY}")

    before, sys.breakpointhook = sys.breakpointhook, refuse
    try:
        yield
    finally:
        sys.breakpointhook = before


def _remedy(exc: BaseException, context: type[object]) -> str:
    """What the text of a Python error leaves out: the nearest name that there is."""
    if isinstance(exc, bdb.BdbQuit):
        return f"the debugger was left, or had no terminal; {_DEBUG_REMEDY}"
    if type(exc) is AttributeError and exc.name is not None:
        return nearest(exc.name, (name for name in dir(exc.obj) if not name.startswith("_")))
    if type(exc) is TypeError and (found := _UNKNOWN_ARGUMENT.search(str(exc))):
        return _nearest_argument(context, found[1], found[2])
    return ""


def _nearest_argument(context: type[object], method: str, argument: str) -> str:
    function: Any = getattr(context, method, None)
    if function is None:
        return ""
    takes = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"{nearest(argument, takes)}; it takes {', '.join(takes)}"
