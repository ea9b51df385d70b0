"""What a script itself can meet: raised at its own line. What leaves the harness is in ``scripted.report.failure``."""

from __future__ import annotations

from typing import ClassVar


class RequestRefused(Exception):
    """The server refused a call of the script: ``status`` is the HTTP status, ``body`` the answer's text."""

    is_meant_for_the_script = True

    def __init__(self, what: str, status: int, body: str) -> None:
        super().__init__(f"{what} was refused with {status}: {body}")
        self.status = status
        self.body = body


class NotIdle(Exception):
    """The engine could not be brought to idle; the text names what is still there. Becomes ServerDirty."""


class Overdue(Exception):
    """The script did not end in its time. Becomes ScriptTimeout."""

    is_meant_for_the_script = True


class NoAnswer(Overdue):
    """A process that has to answer at once said nothing for the run's ``result_timeout_s``: it hangs."""


class BudgetSpent(AssertionError):
    """The step budget was spent before what the script waited for happened. ``made`` counts as that of ``BadCall``."""

    is_meant_for_the_script = True
    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BudgetSpent.made += 1


class BadCall(ValueError):
    """A script used a verb, wait or query in a way that tests nothing. ``made`` counts all of this process."""

    is_meant_for_the_script = True
    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BadCall.made += 1


class UnknownName(BadCall, AttributeError):
    """A script asked for a name that is not there; the text has the nearest one."""
