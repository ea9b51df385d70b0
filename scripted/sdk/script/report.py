"""The report of a script that did not pass: its line, the last steps in words, the counts, how to run it again."""

from __future__ import annotations

import textwrap
from typing import Final

import msgspec

from scripted.report.frames import Frame, where_text, width_of

__all__ = ["AdapterReport"]

_INDENT: Final = "    "


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a script did not pass. ``when`` is what happened and in which step; ``steps`` are the last ones, in words.

    ``inside`` are the lines of the scheduler that raised, if one did.
    """

    error: str
    when: str
    frames: tuple[Frame, ...]
    script: str
    adapter: str
    settings: str
    inside: tuple[Frame, ...] = ()
    steps: tuple[str, ...] = ()
    state: str = ""
    mutant: str | None = None
    replay: str = ""

    @property
    def headline(self) -> str:
        """The failure in one line."""
        return self.error.splitlines()[0] if self.error else self.when

    def render(self, terminal_columns: int | None = None) -> str:
        """The report as text, no wider than a CI log, and than a terminal that is not narrower than is readable."""
        width = width_of(terminal_columns)
        parts = [where_text(self.frames, self.error), self.when, self._inside(), self._steps(width), self._facts(width)]
        return "\n\n".join(part for part in parts if part)

    def _inside(self) -> str:
        return f"In the scheduler:\n{where_text(self.inside, '')}" if self.inside else ""

    def _steps(self, width: int) -> str:
        if not self.steps:
            return ""
        lines = [
            textwrap.fill(line, width, initial_indent=_INDENT, subsequent_indent=_INDENT * 2) for line in self.steps
        ]
        return "\n".join(["The last steps before the end:", *lines])

    def _facts(self, width: int) -> str:
        facts = {
            "State": "\n         ".join(textwrap.wrap(self.state, width - 9)),
            "Adapter": f"{self.adapter}, {self.settings}",
            "Mutant": f"{self.mutant} is switched on: this failure is expected" if self.mutant else "",
            "Replay": self.replay,
        }
        return "\n".join(f"{name + ':':8} {fact}" for name, fact in facts.items() if fact)
