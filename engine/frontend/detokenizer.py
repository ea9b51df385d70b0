"""Text from tokens, a few at a time: the pieces joined are the text, wherever a character was cut between tokens.

Owns the tokens whose text is not final yet. Decodes a window, never the whole output, so that a token costs the same at
the end of a long output as at its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decoder", "Detokenizer"]

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character has at most three of its four bytes, and shows as at most one replacement for each.
MAX_UNFINISHED = 3


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        ...


class Detokenizer:
    """One output's text so far.

    The window is two segments that each began where all text before was final: the settled one, whose text was given
    out and which only lends its context (some tokenizers drop a leading space), and the open one.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._settled: list[int] = []
        self._context = ""
        self._open: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became final, which may be empty."""
        self._open.append(token_id)
        text = self._window_text()
        if text is None:
            return ""
        final = len(text) - _unfinished(text)
        delta = text[self._shown : final]
        self._shown = max(self._shown, final)
        if final == len(text):
            self._settle()
        return delta

    def flush(self) -> str:
        """The text that was not final, once it is known that no more tokens come: replacements for cut characters."""
        text = self._decode([*self._settled, *self._open])
        delta = text[self._shown :]
        self._settle()
        return delta

    def _window_text(self) -> str | None:
        """The text of both segments; None while the open one must not be read yet.

        Tokenizers that fall back to bytes read neighbouring byte tokens as one: an unfinished character then spoils the
        finished one before it, until it is whole itself. One that never gets whole is read without its context.
        """
        text = self._decode([*self._settled, *self._open])
        if text.startswith(self._context):
            return text
        if len(self._open) <= MAX_UNFINISHED:
            return None
        self._shown -= len(self._context)
        self._settled, self._context = [], ""
        return self._decode(self._open)

    def _settle(self) -> None:
        """Close the open segment. One without text (special tokens) gives no context, so the older one is kept too."""
        settled = self._open
        context = self._decode(settled)
        if not context:
            settled = [*self._settled, *self._open]
            context = self._decode(settled)
        self._settled, self._open, self._context = settled, [], context
        self._shown = len(self._context)

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


def _unfinished(text: str) -> int:
    """How many characters at the end may still change when more bytes come."""
    return min(MAX_UNFINISHED, len(text) - len(text.rstrip(REPLACEMENT)))
