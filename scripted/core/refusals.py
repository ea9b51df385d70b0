"""Exceptions for bad input, raised before anything runs, and for defects of the harness."""

from __future__ import annotations


class ScriptDefinitionError(Exception):
    """The input is not a valid script, schedule or target; the text has the rule and the remedy."""


class EngineHidden(ScriptDefinitionError, ImportError):
    """Another package called ``engine`` shadows Lockstep's, which the script imports."""


class BadCommand(ScriptDefinitionError):
    """The line is not a command of the shell; nothing was done."""


class HarnessError(Exception):
    """The harness failed while it ran a schedule, which says nothing about the scheduler. A defect to report."""
