"""What travels between the supervisor and the agent of a stage on another machine: typed, never pickled.

An agent passes on what its stage says and what the supervisor says to the stage, as they are. What is added here is how
the two meet, the stage's life on a machine that the supervisor cannot see, and a pulse.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.core.frames import decoder_of
from engine.core.limits import Limits
from engine.process.control import (
    Drain,
    Drained,
    Dying,
    Loading,
    ProcessDied,
    Ready,
    Serving,
    Shutdown,
)
from engine.process.links.endpoint import Endpoint

# ---- from an agent ----


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an agent. ``stage`` is None where any number will do; ``listens`` is for the stage before.

    ``node`` names the machine and ``pid`` the agent's process there. ``address`` is the machine's in its cluster.
    """

    version: str
    node: str
    pid: int
    stage: int | None
    listens: Endpoint
    address: str = ""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the agent's machine has: digests of its checkpoints, and room for this many tokens of KV, if known.

    The second digest is that of the draft model, empty without one. ``gpu`` tells the stage's GPU from all others of
    the machine, empty without one.
    """

    digests: tuple[str, str]
    kv_tokens: int | None
    gpu: str = ""


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class StagePulse(msgspec.Struct, frozen=True, tag=True):
    """The agent lives. What its stage does with which microbatch, -1 before the first, and whether it is stopped."""

    microbatch_id: int = -1
    phase: int = 0
    stopped: bool = False


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The stage's process ended, with an exit status as subprocess counts it. Nothing follows."""

    status: int


AgentMessage = Join | Prepared | Started | StagePulse | Ended | Ready | Loading | Drained | Dying

# ---- to an agent ----


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This stage is refused, for a reason that its user can remedy. Nothing follows."""

    why: str


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All stages are here. The agent's number, the server's settings as JSON, and how many stages share its machine.

    The settings have no keys of clients in them.
    """

    stage: int
    settings: str
    stages_here: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start the stage. ``book`` says where each stage listens, in stage order.

    ``hidden_transport`` is what all of them use: decided once, because machines differ.
    """

    limits: Limits
    book: tuple[Endpoint, ...]
    hidden_transport: str


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    number: int


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The supervisor lives."""


ToAgent = Refused | Assigned | Begin | SendSignal | Pulse | Serving | ProcessDied | Drain | Shutdown

# Each raises BadFrameError for anything else.
decode_agent_message: Callable[[bytes], AgentMessage] = decoder_of(AgentMessage)
decode_to_agent: Callable[[bytes], ToAgent] = decoder_of(ToAgent)


class StageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of a stage is started with, whoever starts it: a person, Ray, or a harness.

    ``join`` is where the server listens; without ``stage`` the agent gets a number that is free.

    ``listen`` is where the stage before connects, unless said the interface by which the server was reached;
    ``advertise`` is what others are told instead. ``model`` is the checkpoint's path here, if it is another one than on
    the server. ``node`` is the name of this machine in causes, its host name if empty, and ``address`` its address in
    its cluster. ``timeout_s`` bounds the wait for a server that is not there yet.
    """

    join: Endpoint
    stage: int | None = None
    listen: Endpoint | None = None
    advertise: Endpoint | None = None
    model: str = ""
    node: str = ""
    address: str = ""
    timeout_s: float = 600.0
