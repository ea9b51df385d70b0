"""The root of every exception that Lockstep raises on purpose, and its text on a terminal."""

from __future__ import annotations

from typing import Final

# An error may quote a value of any length; pytest's longest explanation of an assertion fits.
MAX_TEXT_CHARS: Final = 16_384


class LockstepError(Exception):
    """Base of all errors of ``engine`` and ``scripted``; a command shows its text and nothing else."""


class UnwritableFileError(LockstepError, ValueError):
    """A command cannot write its output file; the text names the flag, the file and the reason."""


def error_lines(begin: str, text: str) -> str:
    """Return a text as lines for a terminal, each after ``begin``.

    A part of the text may be from a stranger's file.
    """
    return "".join(f"{begin}: {visible(line)}\n" for line in without_middle(text).splitlines())


def without_middle(text: str, limit_chars: int = MAX_TEXT_CHARS) -> str:
    """Shorten a text to its beginning and its end, which in an error has the remedy, and the number of characters
    between them.
    """
    left_out = len(text) - limit_chars
    if left_out <= 0:
        return text
    end_chars = limit_chars // 4
    return f"{text[: limit_chars - end_chars]}... ({left_out} more) ...{text[-end_chars:]}"


def visible(text: str) -> str:
    """Escape the control characters of a text, which a terminal would obey, but for line feeds and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
