"""The root of every exception that Lockstep raises on purpose."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of all errors of ``engine`` and ``scripted``; a command shows its text and nothing else."""


class UnwritableFileError(LockstepError, ValueError):
    """A command cannot write its output file; the text names the flag, the file and the reason."""
