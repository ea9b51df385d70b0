"""Where the lines of a session come from: a person at a terminal, or a file.

Owns reading alone; what a line means is not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TextIO


class Prompt(Protocol):
    """A source of lines."""

    @property
    def is_interactive(self) -> bool:
        """True when a person reads the answers as they come."""
        ...

    def read(self, prompt: str) -> str | None:
        """The next line, without its end; None when there will be none."""
        ...


class TerminalPrompt:
    """A person who types, with the history and the editing keys of readline where it is installed."""

    is_interactive = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() uses it once it is imported

    def read(self, prompt: str) -> str | None:
        """One line; an interrupt drops what was typed, the end of the input leaves."""
        try:
            return input(prompt)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


class FilePrompt:
    """A file or a pipe; each line is echoed, so that the output reads like a session."""

    is_interactive = False

    def __init__(self, stream: TextIO, echo: Callable[[str], None]) -> None:
        self._stream = stream
        self._echo = echo

    def read(self, prompt: str) -> str | None:
        line = self._stream.readline()
        if not line:
            return None
        self._echo(prompt + line.rstrip("\n"))
        return line.rstrip("\n")
