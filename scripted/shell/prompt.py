"""Reads a session's lines from a terminal or a file, without interpreting them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO


class Prompt(Protocol):
    @property
    def is_interactive(self) -> bool:
        """Whether a person reads the answers as they come."""
        ...

    def read(self, prompt: str) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        ...

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        """Take the function that completes a line at its end."""
        ...


class TerminalPrompt:
    """Reads a terminal, with readline's history, editing keys and completion if it is installed."""

    is_interactive = True

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # input() uses it once it is imported

            readline.set_completer_delims(" ")
            readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        with contextlib.suppress(ImportError):
            import readline

            def complete(begun: str, number: int) -> str | None:
                line = readline.get_line_buffer()[: readline.get_endidx()]
                fitting = [word for word in completions(line) if word.startswith(begun)]
                # No blank between a name and its value.
                ended = [word if word.endswith("=") else f"{word} " for word in fitting]
                return ended[number] if number < len(ended) else None

            readline.set_completer(complete)

    def read(self, prompt: str) -> str | None:
        """Read one line; an interrupt gives an empty line."""
        try:
            return input(prompt)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


class FilePrompt:
    """Reads a file or a pipe and echoes each line, so that the output reads like a session."""

    is_interactive = False

    def __init__(self, stream: TextIO, echo: Callable[[str], None]) -> None:
        self._stream = stream
        self._echo = echo

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        """Do nothing: a file is complete."""

    def read(self, prompt: str) -> str | None:
        line = self._stream.readline()
        if not line:
            return None
        self._echo(prompt + line.rstrip("\n"))
        return line.rstrip("\n")
