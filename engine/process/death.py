"""The report of a server's death: the process that died first, the cause, and the time.

Owns the report's shape and its file; decides nothing. It is the last thing that a broken server writes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from lockstep.whole_file import write_whole

DEATH_FILE = "death.json"
# The exit status of a process that could not continue; stderr has the reason.
EXIT_FAILED = 1


class DeathReport(msgspec.Struct, frozen=True, kw_only=True):
    """The first death of a server.

    ``cause`` is a traceback, or a sentence about a signal or a status. One of ``exit_code`` and ``signal`` (a number)
    is set if the supervisor saw the end. ``when`` is in seconds since the epoch. ``pid`` is 0 if unknown. ``node`` is
    the name of the process's machine, and ``place`` that machine's address and processes; both are empty for the
    server's own. ``refusal`` is the reason of a failed start, if an error of the engine tells a user everything.
    """

    process: str
    pid: int
    cause: str
    when: float
    exit_code: int | None = None
    signal: int | None = None
    node: str = ""
    place: str = ""
    refusal: str = ""

    def sentence(self) -> str:
        where = f"on {self.place}: " if self.place else ""
        if self.refusal:
            return where + self.refusal
        who = f"{self.process} process" + (f" (pid {self.pid})" if self.pid else "")
        return f"the {who} died and the server with it: {where}{self.cause}"

    def write(self, folder: Path) -> None:
        """Write ``death.json`` into a folder atomically."""
        write_whole(folder / DEATH_FILE, msgspec.json.format(msgspec.json.encode(self)))


def read_death_report(folder: Path) -> DeathReport | None:
    """Read the report in a server's folder; None if it left none."""
    try:
        data = (folder / DEATH_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=DeathReport)


def describe_status(status: int) -> str:
    """Describe an exit status as subprocess counts it: a negative one is a signal, any other an exit code."""
    if status >= 0:
        return f"it exited with status {status} although it was not told to"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "an unknown signal"
    return f"it was killed by signal {-status} ({name})"
