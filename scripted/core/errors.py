"""Exceptions raised inside a script, at its own line. ``scripted.report.failure`` has those that leave the harness."""

from __future__ import annotations

from typing import ClassVar


class MeantForTheScript(Exception):
    """An exception that a verb or a wait raises deliberately: a report shows it at the script's line."""


class RequestRefused(MeantForTheScript):
    """The server refused a call of the script: ``status`` is the HTTP status, ``body`` the text of the answer."""

    def __init__(self, what: str, status: int, body: str) -> None:
        super().__init__(f"{what} was refused with {status}: {body}")
        self.status = status
        self.body = body


class NotIdle(Exception):
    """The engine could not be brought to idle; the text names what it still holds. Becomes ServerDirty."""


class Overdue(MeantForTheScript):
    """The script did not end in time. Becomes ScriptTimeout."""


class NoAnswer(Overdue):
    """A process that has to answer at once was silent for the run's ``result_timeout_s``: it hangs."""


class BudgetSpent(MeantForTheScript, AssertionError):
    """A wait spent its step budget before its condition held. ``made`` counts the instances in this process."""

    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BudgetSpent.made += 1


class BadCall(MeantForTheScript, ValueError):
    """A script called a verb, wait or query with bad arguments, or so that it tests nothing. ``made`` counts them."""

    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BadCall.made += 1


class UnknownName(BadCall, AttributeError):
    """A script used an attribute that does not exist; the text suggests the nearest name."""
