"""The shell's words for verbs: how one is typed, what it means, and how the words after it are read.

Reading gives a verb or a refusal that says what the word takes. It knows no session.
"""

from __future__ import annotations

from collections.abc import Callable

from scripted.core.refusals import BadCommand
from scripted.core.verb import Verb

__all__ = ["ShellWord", "alone", "numbered", "only", "seconds", "whole"]


class ShellWord:
    """``takes`` and ``meaning`` are its line of the help; ``read`` makes a verb of what is typed after it."""

    def __init__(self, word: str, takes: str, meaning: str, read: Callable[[list[str]], Verb]) -> None:
        self.word = word
        self.takes = takes
        self.meaning = meaning
        self.read = read


def alone(word: str, meaning: str, verb: str) -> ShellWord:
    """A word with nothing after it."""

    def read(words: list[str]) -> Verb:
        if words:
            raise BadCommand(f"{word} stands alone, got {' '.join(words)!r} after it")
        return Verb(verb)

    return ShellWord(word, "", meaning, read)


def numbered(word: str, takes: str, meaning: str, verb: str) -> ShellWord:
    """A word with a whole number after it, which may be left out if ``takes`` is in brackets."""
    optional = takes.startswith("[")

    def read(words: list[str]) -> Verb:
        if optional and not words:
            return Verb(verb)
        return Verb(verb, whole(word, only(word, words, "a whole number")))

    return ShellWord(word, takes, meaning, read)


def only(word: str, words: list[str], what: str) -> str:
    """The one word that there is. Raises BadCommand."""
    if len(words) != 1:
        raise BadCommand(f"{word} takes {what}, got {' '.join(words) or 'nothing'}")
    return words[0]


def whole(word: str, text: str) -> int:
    """A whole number. Raises BadCommand."""
    try:
        return int(text)
    except ValueError as exc:
        raise BadCommand(f"{word} takes a whole number, got {text!r}") from exc


def seconds(word: str, words: list[str]) -> float:
    """Seconds from 0 on. Raises BadCommand."""
    text = only(word, words, "seconds")
    try:
        value = float(text)
    except ValueError as exc:
        raise BadCommand(f"{word} takes seconds, got {text!r}") from exc
    if not 0 <= value < float("inf"):
        raise BadCommand(f"{word} takes seconds from 0 on, got {text}")
    return value
