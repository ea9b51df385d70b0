"""What a script's process and an engine of its fleet say to each other, over a private socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from engine.frames import decoder_of
from engine.limits import Limits
from engine.messages import ClientMessage, Refusal
from engine.scheduler import Step

# What an engine of a fleet can be asked between two of its steps.
FollowerVerb = Literal[
    "take_completion",
    "take_grammar",
    "take_transfer",
    "answer",
    "fail_next_step",
    "spare_next_step",
    "describe",
    "kill_stage",
    "stall_stage",
    "resume_stage",
    "limit_waits",
    "start_over",
]


class Do(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make this step. It is answered with the step's result."""

    step: Step


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Do this, or give this, without a step."""

    verb: FollowerVerb
    numbers: tuple[int | float, ...] = ()
    replies: tuple[Refusal, ...] = ()


class FollowerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine is up and stands still."""

    limits: Limits


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The front end has sent these to the scheduler, which has not seen them. Nobody asked."""

    messages: tuple[ClientMessage, ...]


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was told is done, what was asked for is this."""

    value: msgspec.Raw


class AskedInVain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was asked for did not come."""

    error: str


Reply = FollowerReady | Arrived | Answered | AskedInVain

# Raises BadFrameError for anything else, as the one below.
decode_command: Callable[[bytes], Do | Ask] = decoder_of(Do | Ask)
decode_reply: Callable[[bytes], Reply] = decoder_of(Reply)
