"""What is refused before anything runs: a function that is no script, a schedule or a command that cannot be read."""

from __future__ import annotations


class ScriptDefinitionError(Exception):
    """The input is no valid script, schedule or target; the text says what it should be."""


class EngineHidden(ScriptDefinitionError, ImportError):
    """Another package called ``engine`` is in the way of Lockstep's, which scripts of its own scheduler need."""


class BadCommand(ScriptDefinitionError):
    """A line that is no command of the shell; nothing was done."""


class HarnessError(Exception):
    """The harness itself failed while it ran a schedule: nothing is said about the scheduler. A defect to report."""
