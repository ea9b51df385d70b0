"""The docstring of a test that is written from a schedule: what must not happen, and the command that replays it."""

from __future__ import annotations

import textwrap
from typing import Final

from scripted.core.schedule import Schedule
from scripted.search.execution import Failure

__all__ = ["written_docstring"]

_WIDTH: Final = 116
_SHOWN_LINES: Final = 20
_INDENT: Final = "    "


def written_docstring(schedule: Schedule, failure: Failure | None, mutant: str | None) -> str:
    """In ASCII, with its quotes. A schedule that is too long to be read is left out: the script below says it."""
    method = "Method: the events of the schedule at its steps, then to the end."
    if failure is None:
        lines = ['"""A schedule as a test.', "", "Goal: every promise is kept.", f"{method} Origin: scripted replay."]
    else:
        what = f"step {failure.step}: {failure.type}: {failure.text}"
        lines = ['"""Found by search: a schedule under which the scheduler broke a promise.', ""]
        lines += textwrap.wrap(f"Goal: this must not happen: {_ascii(what)}", _WIDTH)
        lines += [f"{method} Origin: scripted explore."]
    if mutant is not None:
        lines.append(f"Mutant: {mutant}.")
    shown = textwrap.wrap(f"scripted replay '{schedule}'", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    lines += ["", *(_INDENT + line for line in shown), '"""'] if len(shown) <= _SHOWN_LINES else ['"""']
    return "\n".join(lines)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\\", "/").replace('"""', "'''")
