"""Messages between the supervisor and the agent of a stage on another machine: typed, never pickled.

An agent forwards the control messages between its stage and the supervisor unchanged. The messages here are for
everything else: joining, starting and ending a remote stage, and a pulse.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.core.frames import decoder_of
from engine.core.limits import Limits
from engine.process.control import Drain, Drained, Dying, Loading, ProcessDied, Ready, Serving, Shutdown
from engine.process.links.endpoint import Endpoint

# ---- from an agent ----


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of an agent. ``stage`` is None for any free number; the previous stage connects to ``listens``.

    ``node`` names the machine, ``pid`` is the agent's process there, ``address`` the machine's address in its cluster.
    """

    version: str
    node: str
    pid: int
    stage: int | None
    listens: Endpoint
    address: str = ""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent's report of its machine: digests of its checkpoints, and its capacity in tokens of KV, if measured.

    The second digest is the draft model's, empty without one. ``gpu`` identifies the stage's GPU on the machine, empty
    without one.
    """

    digests: tuple[str, str]
    kv_tokens: int | None
    gpu: str = ""


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class StagePulse(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, with the stage's microbatch (-1 before the first), its phase, and whether it is stopped."""

    microbatch_id: int = -1
    phase: int = 0
    stopped: bool = False


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The stage's exit status, negative for a signal as in subprocess. The last message of an agent."""

    status: int


AgentMessage = Join | Prepared | Started | StagePulse | Ended | Ready | Loading | Drained | Dying

# ---- to an agent ----


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The refusal of a stage, with the reason and the remedy. The last message to an agent."""

    why: str


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stage's number, once all stages have joined, and the server's settings as JSON, without the clients' keys.

    ``stages_here`` counts the stages on the agent's machine, which share its memory.
    """

    stage: int
    settings: str
    stages_here: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to start the stage. ``book`` has the endpoint of each stage, in stage order.

    ``hidden_transport`` is the server's choice for all stages, because machines differ.
    """

    limits: Limits
    book: tuple[Endpoint, ...]
    hidden_transport: str


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    number: int


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The supervisor's sign of life."""


ToAgent = Refused | Assigned | Begin | SendSignal | Pulse | Serving | ProcessDied | Drain | Shutdown

# Each raises BadFrameError for anything else.
decode_agent_message: Callable[[bytes], AgentMessage] = decoder_of(AgentMessage)
decode_to_agent: Callable[[bytes], ToAgent] = decoder_of(ToAgent)


class StageOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a stage's agent, which a person, Ray or a harness starts.

    ``join`` is where the server listens; without ``stage`` the server assigns a free number.

    ``listen`` is where the previous stage connects, by default the interface that reaches the server; ``advertise``
    replaces it in messages to others. ``model`` is the checkpoint's path here, if it differs from the server's.
    ``node`` names this machine in error causes, by default its host name; ``address`` is its address in its cluster.
    ``timeout_s`` bounds the wait for a server that does not listen yet.
    """

    join: Endpoint
    stage: int | None = None
    listen: Endpoint | None = None
    advertise: Endpoint | None = None
    model: str = ""
    node: str = ""
    address: str = ""
    timeout_s: float = 600.0
