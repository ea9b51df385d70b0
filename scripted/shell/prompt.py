"""Where the lines of a session come from: a person at a terminal, or a file.

Owns reading alone; what a line means is not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO


class Prompt(Protocol):
    @property
    def is_interactive(self) -> bool:
        """True when a person reads the answers as they come."""
        ...

    def read(self, prompt: str) -> str | None:
        """The next line, without its end; None when there will be none."""
        ...

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        """What may stand where a line, as far as it is typed, ends."""
        ...


class TerminalPrompt:
    """A person who types, with history, editing keys and completion of readline where it is installed."""

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
                # A name that takes a value goes on where it stands.
                ended = [word if word.endswith("=") else f"{word} " for word in fitting]
                return ended[number] if number < len(ended) else None

            readline.set_completer(complete)

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

    def complete_with(self, completions: Callable[[str], Sequence[str]]) -> None:
        """A file is written already."""

    def read(self, prompt: str) -> str | None:
        line = self._stream.readline()
        if not line:
            return None
        self._echo(prompt + line.rstrip("\n"))
        return line.rstrip("\n")
