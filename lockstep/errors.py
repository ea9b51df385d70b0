"""The root of every exception that Lockstep raises on purpose, and its text on a terminal."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of all errors of ``engine`` and ``scripted``; a command shows its text and nothing else."""


class UnwritableFileError(LockstepError, ValueError):
    """A command cannot write its output file; the text names the flag, the file and the reason."""


def error_lines(begin: str, text: str) -> str:
    """Return a text as lines for a terminal, each after ``begin``.

    Control characters are escaped: a part of the text may be from a stranger's file, and a terminal would obey it.
    """
    return "".join(f"{begin}: {''.join(map(_visible, line))}\n" for line in text.splitlines())


def _visible(character: str) -> str:
    return character if character.isprintable() or character == "\t" else ascii(character)[1:-1]
