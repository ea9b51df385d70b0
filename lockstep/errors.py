"""The root of every exception that Lockstep raises on purpose."""

from __future__ import annotations


class LockstepError(Exception):
    """Base of the errors of ``engine`` and of those of ``scripted``; a command shows its text and nothing else."""


class UnwritableFileError(LockstepError, ValueError):
    """A file that a command is to write cannot be written; the text names the flag, the file, and why."""
