"""Frames of wrong content: for any bytes, a decoder returns a value of its type or raises BadFrameError."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.tiers.server.wire import decode_command
from scripted_lockstep.tiers.server.wire import decode_replies as decode_gate_reply

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.frames import BadFrameError, decoder_of
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import (
    CallAnswer,
    Generate,
    SamplingParams,
    TokenOutput,
    decode_client_message,
    decode_replies,
    encode,
)
from engine.core.plan import Forward, ForwardMode, Segment
from engine.pipeline.wire import ControlDone, Launch, decode_stage_message, decode_stage_report
from engine.process.control import Dying, decode_child_message
from engine.process.links.endpoint import Endpoint
from engine.server.launch.preload import ServeRequest, decode_order
from engine.server.placement.messages import Begin, StagePulse, decode_agent_message, decode_to_agent
from scripted.script.wire import RunScript

PLAN = Forward(1, ForwardMode.PREFILL, (Segment("rid", 0, 0, (1, 2), 0, (0,), True),))
LIMITS = Limits.of(EngineConfig(), EMBEDDED_FACTS)
ORDER = ServeRequest(settings="{}", private_dir="/a", log_path="/b", working_dir="/c", import_path=("d",))
# Every decoder of what comes from another process, and a frame that it takes.
DECODERS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    "client message": (
        decode_client_message,
        Generate(rid="a", prompt_ids=(1, 2), sampling=SamplingParams(stop=("x",))),
    ),
    "replies": (decode_replies, (TokenOutput(rid="a", token_ids=(1,)), CallAnswer(call_id="c", ok=True, message="m"))),
    "stage message": (decode_stage_message, Launch(PLAN)),
    "stage report": (decode_stage_report, ControlDone(microbatch_id=1, stage=0, error="text")),
    "child message": (decode_child_message, Dying(error="text", traceback="text")),
    "script": (decode_command, RunScript(file="f", name="n", args=["x", [1], {"y": 2.0}])),
    "gate": (decode_gate_reply, ScriptSucceeded(steps=1, digest="d", plan_digest="p", reached={"w": 1})),
    "order": (decode_order, ORDER),
    "agent message": (decode_agent_message, StagePulse(3, 1, stopped=True)),
    "to an agent": (decode_to_agent, Begin(limits=LIMITS, book=(Endpoint("h", 1),), hidden_transport="socket")),
}
CHANGES = 400
NOT_UTF8 = b"\xff"


@pytest.mark.parametrize("name", DECODERS)
def test_text_that_is_not_utf8_is_a_bad_frame(name: str) -> None:
    """A05: each byte of the frame in turn; the library lets what is no text through as an error of its own."""
    decode, message = DECODERS[name]
    good = encode(message)
    assert decode(good) == message
    for place in range(len(good)):
        _decode(decode, good[:place] + NOT_UTF8 + good[place + 1 :])


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_are_a_value_or_a_bad_frame(name: str) -> None:
    """A failure stays alone and never ends the process (A05)."""
    decode, message = DECODERS[name]
    good = encode(message)
    chance = random.Random(0)
    for _ in range(CHANGES):
        frame = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        _decode(decode, bytes(frame[: chance.randint(0, len(frame))]))


def test_nesting_without_end_and_numbers_beyond_all_types_are_bad_frames() -> None:
    decode = decoder_of(Any)
    with pytest.raises(BadFrameError, match="RecursionError"):
        decode(b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(BadFrameError, match="truncated"):
        decode(b"\xdd\xff\xff\xff\xff")


def test_a_bad_frame_is_an_error_of_the_engine_and_of_the_library() -> None:
    assert issubclass(BadFrameError, EngineError)
    assert issubclass(BadFrameError, msgspec.DecodeError)


def _decode(decode: Callable[[bytes], object], frame: bytes) -> None:
    try:
        decode(frame)
    except BadFrameError as exc:
        assert str(exc)  # noqa: PT017 - any other exception fails the test


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [2**63]},
        {"prompt_ids": [-1]},
        {"priority": 2**40},
        {"top_logprobs_num": 2**63},
        {"sampling": {"min_new_tokens": 2**64 - 1}},
        {"sampling": {"max_new_tokens": 2**40}},
        {"sampling": {"seed": 2**64 - 1}},
        {"sampling": {"top_k": 2**50}},
        {"sampling": {"stop_token_ids": [2**64 - 1]}},
    ],
    ids=str,
)
def test_numbers_that_arithmetic_would_overflow_on_are_no_request(change: dict[str, Any]) -> None:
    """A05: the frame is dropped; a plan with such a number could not be encoded, which would end the scheduler."""
    body = {"type": "Generate", "rid": "a", "prompt_ids": [1, 2], "sampling": {}}
    assert decode_client_message(msgspec.msgpack.encode(body))
    with pytest.raises(BadFrameError, match="Expected `int`"):
        decode_client_message(msgspec.msgpack.encode(body | change))
