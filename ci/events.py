"""The events that the probe inside pytest sends to the process that runs it: one JSON line an event.

Both ends import this file, so the line format has one definition. `file` is relative to the repository.
"""

import signal
from typing import cast

import msgspec

from lockstep.documents import document

STACKS_SIGNAL = signal.SIGUSR2  # The other way: asks a process with the probe for its stacks, and ends it.


class Collected(msgspec.Struct, frozen=True, tag=True):
    """How many test runs a file will have."""

    file: str
    count: int


class CollectFailed(msgspec.Struct, frozen=True, tag=True):
    """A file that could not be collected."""

    file: str
    error: str
    text: str


class CollectSkipped(msgspec.Struct, frozen=True, tag=True):
    """A file that skips itself as a whole."""

    file: str
    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    file: str
    test: str


class Reported(msgspec.Struct, frozen=True, tag=True):
    """One phase (set-up, call or tear-down) of a test is over. `error` is the exception's bare class name."""

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
    """Pytest's session is over with this exit status."""

    status: int


Event = Collected | CollectFailed | CollectSkipped | Started | Reported | Finished | SessionEnded

_ENCODER = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    return _ENCODER.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """Read one line; raises `DocumentError` for anything else than an event."""
    event: Event = document(line, cast(type[Event], Event))
    return event
