"""What goes wrong with a script: the errors that leave the harness, and those that a script itself can meet.

The first kind carries a report and is what pytest shows; the second kind is raised at the script's own line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from scripted.report.failure import FailureReport

__all__ = [
    "BadCall",
    "BudgetSpent",
    "NoAnswer",
    "NotIdle",
    "Overdue",
    "RequestRefused",
    "ScriptError",
    "ScriptFailed",
    "ScriptTimeout",
    "ServerDied",
    "ServerDirty",
    "UnknownName",
]


class ScriptError(Exception):
    """A script did not pass. ``report`` says everything that is known; ``str()`` is the report as text."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report.headline)
        self.report = report

    def __str__(self) -> str:
        return self.report.render()


class ScriptFailed(ScriptError):
    """The script raised, or an invariant did not hold after one of its steps. The server can be used again."""


class ScriptTimeout(ScriptError):
    """The script did not end in time."""


class ServerDied(ScriptError):
    """The engine died under the script."""


class ServerDirty(ScriptError):
    """The engine could not be brought back to idle before the script; the report names what is still there."""


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
    """A script called a verb in a way that it does not take. ``made`` counts all that there were in this process."""

    is_meant_for_the_script = True
    made: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        BadCall.made += 1


class UnknownName(BadCall, AttributeError):
    """A script asked for a name that is not there; the text has the nearest one."""
