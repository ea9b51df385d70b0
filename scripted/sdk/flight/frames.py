"""The frames of a flight: a scheduler's inputs, in the order in which they took effect, and a digest of each plan.

A request has a number, by which other frames refer to it; so has a plan, counted from 1. Frames never contain prompt
text.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

FORMAT: Final = "lockstep-flight-1"
# A number of JSON may have any length, and one beyond 64 bits cannot be encoded again.
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# The value of a setting, or of a request's field that only its engine knows.
Scalar: TypeAlias = bool | Int | float | str | None
# A request's number and a count of its tokens.
Count: TypeAlias = tuple[Int, Int]
# Drafts by request number.
Drafts: TypeAlias = tuple[tuple[Int, tuple[Int, ...]], ...]


class FlightFrame(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of a flight. Frames refer to no other frames, so the garbage collector need not track them."""


class FlightHeader(FlightFrame, frozen=True, kw_only=True, omit_defaults=False, tag="flight"):
    """The first line: the adapter whose scheduler was recorded, its release and its settings.

    ``notes`` names settings and features that the recording does not carry. ``began`` is in seconds since 1970.
    """

    format: str = FORMAT
    adapter: str
    version: str = ""
    config: dict[str, Scalar] = {}
    notes: tuple[str, ...] = ()
    redacted: bool = False
    began: float = 0.0

    @property
    def words(self) -> dict[str, str]:
        """The settings as the words of a configuration."""
        return {name: str(value) for name, value in self.config.items()}


# -- inputs --


class Arrived(FlightFrame, frozen=True, kw_only=True, tag="arrived"):
    """A request as it reached the scheduler.

    ``priority`` is the engine's own number, ``at`` the arrival time. ``images`` gives start, length and name of each.
    ``engine`` has the fields that only the engine reads.
    """

    id: Int
    rid: str
    prompt_ids: tuple[Int, ...]
    max_new_tokens: Int
    stop_token_ids: tuple[Int, ...] = ()
    priority: Int = 0
    at: float = 0.0
    lora: Int = 0
    grammar: bool = False
    salt: str = ""
    images: tuple[tuple[Int, Int, str], ...] = ()
    engine: dict[str, Scalar] = {}


class Aborted(FlightFrame, frozen=True, kw_only=True, tag="aborted"):
    """Requests that were ended from outside, with the engine's word for it."""

    ids: tuple[Int, ...]
    status: str = "abort"


class Called(FlightFrame, frozen=True, kw_only=True, tag="called"):
    """A call of an operator: its name, arguments and answer."""

    name: str
    arguments: dict[str, Scalar] = {}
    answer: Scalar = None


class Offered(FlightFrame, frozen=True, kw_only=True, tag="offered"):
    """A KV connector's answer for a request: how many more tokens it has; None if it does not know yet."""

    id: Int
    tokens: Int | None
    is_async: bool = False


class Kept(FlightFrame, frozen=True, kw_only=True, tag="kept"):
    """A KV connector's answer at a request's end: it keeps the blocks until they are sent."""

    id: Int


class Ready(FlightFrame, frozen=True, kw_only=True, tag="ready"):
    """A grammar is compiled, or cannot be."""

    id: Int
    compiles: bool = True


class Drafted(FlightFrame, frozen=True, kw_only=True, tag="drafted"):
    """Guesses handed to the scheduler: for the next plan, or into the already made ``plan``."""

    drafts: Drafts
    plan: Int = 0


class Result(FlightFrame, frozen=True, kw_only=True, tag="result"):
    """The result of a plan: the sampled tokens of each share in the plan's order; none if a share samples nothing.

    ``sent`` and ``received`` are requests whose transfers are over, ``failed`` requests whose loads failed, ``lost``
    blocks that did not arrive.
    """

    plan: Int
    token_ids: tuple[tuple[Int, ...], ...] = ()
    sent: tuple[Int, ...] = ()
    received: tuple[Int, ...] = ()
    failed: tuple[Int, ...] = ()
    lost: tuple[Int, ...] = ()


# -- outputs --


class Planned(FlightFrame, frozen=True, kw_only=True, tag="planned"):
    """A plan: which requests compute how many tokens, and two checksums.

    ``shape`` covers requests, positions, guesses and preemptions; ``blocks`` covers the block tables. ``now`` is in
    seconds since the recording began. An empty plan stands for ``times`` consecutive ones.
    """

    plan: Int
    now: float
    shape: Int
    blocks: Int = 0
    shares: tuple[Count, ...] = ()
    preempted: tuple[Int, ...] = ()
    times: Int = 1

    @property
    def is_empty(self) -> bool:
        return not (self.shares or self.preempted)


# -- the beginning of a ring that lost older frames --


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A live request: its arrival, its output, its place, and the scheduler's counters for it.

    ``place`` is the scheduler's own word for the request's state.
    """

    request: Arrived
    said: tuple[Int, ...] = ()
    is_running: bool = False
    computed: Int = 0
    place: str = ""
    counters: dict[str, Int] = {}


class InFlight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A plan without a result."""

    plan: Int
    shares: tuple[Count, ...] = ()
    drafts: Drafts = ()


class Start(FlightFrame, frozen=True, kw_only=True, tag="start"):
    """The scheduler before the first kept frame, as far as events can express it; ``lost`` names the rest.

    ``held`` has the running requests, then the waiting ones, each in the scheduler's order.
    """

    plan: Int
    now: float
    held: tuple[Held, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    paused: str = ""
    lost: tuple[str, ...] = ()


class End(FlightFrame, frozen=True, kw_only=True, tag="end"):
    """The reason for writing: ``crash``, ``stall``, ``signal``, ``call`` or ``exit``; ``error`` is the fatal error."""

    why: str
    now: float
    error: str = ""


Event: TypeAlias = Arrived | Aborted | Called | Offered | Kept | Ready | Drafted | Result
AnyFrame: TypeAlias = FlightHeader | Start | Event | Planned | End

_encode = msgspec.json.Encoder().encode
_digest = msgspec.msgpack.Encoder().encode


def line_of(frame: AnyFrame) -> bytes:
    return _encode(frame) + b"\n"


def shape_of(shares: Sequence[tuple[int, int, int, int]], preempted: Iterable[int]) -> int:
    """Return the checksum of a plan: the number, first position, tokens and guesses of each share."""
    return zlib.crc32(_digest((shares, sorted(preempted)))) if shares or preempted else 0


def blocks_of(tables: object) -> int:
    """Return the checksum of a plan's block tables, in the plan's order."""
    return zlib.crc32(_digest(tables))
