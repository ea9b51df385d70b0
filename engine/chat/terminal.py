"""The terminal around a conversation: reads lines, shows answers as they come, obeys a few commands.

Owns what Ctrl-C means: during an answer it ends the answer, at the prompt it ends the chat. Knows no protocol.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from rich.console import Console

from engine.chat.conversation import ChatError, Conversation

__all__ = ["Terminal"]

PROMPT = "[bold]> [/bold]"
HELP = "/clear forgets what was said, /exit leaves, Ctrl-C ends an answer"


class Terminal:
    """A chat on a console."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console

    def run(self) -> None:
        """Talk until the user leaves."""
        self._console.print(f"{self._conversation.model}: {HELP}", style="dim", highlight=False, markup=False)
        while (line := self._read()) is not None:
            match line:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    self._conversation.clear()
                case command if command.startswith("/"):
                    self._console.print(HELP, style="dim", highlight=False)
                case text:
                    self._answer(text)

    def _read(self) -> str | None:
        """The next line, stripped; None when the user is done."""
        try:
            return self._console.input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _answer(self, text: str) -> None:
        began_s = time.monotonic()
        pieces = self._conversation.ask(text)
        assert isinstance(pieces, Generator), "an answer can be closed"
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    # As it is: brackets and numbers of the model are no markup.
                    self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(" [broken off]", style="dim", markup=False)
            return
        except ChatError as exc:
            self._console.print(f"\nerror: {exc}", style="red", markup=False, highlight=False)
            return
        self._console.print()
        self._tell_speed(time.monotonic() - began_s)

    def _tell_speed(self, seconds: float) -> None:
        tokens = self._conversation.completion_tokens
        if tokens:
            note = f"{tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s"
            self._console.print(note, style="dim", highlight=False)
