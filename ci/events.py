"""The events that the probe in pytest sends to its parent process, one JSON line each.

Both ends import this file, so the line format has one definition. `file` is relative to the repository.
"""

import signal
from typing import cast

import msgspec

from lockstep.documents import document

STACKS_SIGNAL = signal.SIGUSR2  # Sent to a process with the probe: it writes its stacks and ends.


class Collected(msgspec.Struct, frozen=True, tag=True):
    """How many test runs a file has."""

    file: str
    count: int


class CollectFailed(msgspec.Struct, frozen=True, tag=True):
    """A file that could not be collected."""

    file: str
    error: str
    text: str


class CollectSkipped(msgspec.Struct, frozen=True, tag=True):
    """A file that skips itself."""

    file: str
    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    file: str
    test: str


class Reported(msgspec.Struct, frozen=True, tag=True):
    """The end of one phase (set-up, call or tear-down) of a test. `error` is the exception's bare class name."""

    file: str
    test: str
    outcome: str
    seconds: float
    error: str
    text: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    file: str
    test: str


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """The end of pytest's session, with its exit status."""

    status: int


Event = Collected | CollectFailed | CollectSkipped | Started | Reported | Finished | SessionEnded

_ENCODER = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    return _ENCODER.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """Decode one line. Raises `DocumentError` for a line that is not an event."""
    event: Event = document(line, cast(type[Event], Event))
    return event
