"""Hidden states over sockets: every element type, failures, and messages that must not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import ProcessDiedError, StepFailedError
from engine.core.messages import Completion, encode
from engine.core.plan import (
    DECODE,
    MIXED,
    PREFILL,
    Forward,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    ProfileSwitch,
    SamplingSpec,
    Segment,
    WeightUpdate,
)
from engine.pipeline.channel import StageChannel, StageChannels
from engine.pipeline.transport import FRAME_HEAD, DistributedTransport, HiddenFailed, SocketTransport
from engine.pipeline.wire import (
    Describe,
    EndStage,
    FailNextStep,
    Forget,
    Launch,
    OrderLora,
    StageMessage,
    StageView,
    decode_stage_message,
    decode_stage_report,
)
from engine.pipeline.wires import StageWires

WAIT_S = 30.0
HIDDEN_SIZE = 8
CPU = torch.device("cpu")
# More than a socket takes at once.
MANY_TOKENS = 100_000

Pair = tuple[SocketTransport, SocketTransport]


@pytest.fixture
def pair(private_dir: Path) -> Iterator[Pair]:
    ends = ends_of(private_dir, torch.float32)
    yield ends
    for end in ends:
        end.close()


def ends_of(private_dir: Path, dtype: torch.dtype) -> Pair:
    """Return the sender and the receiver."""
    second, first = (
        SocketTransport(StageWires.local(private_dir, stage, 2), stage, facts(dtype), CPU) for stage in (1, 0)
    )
    return first, second


def facts(dtype: torch.dtype = torch.float32, hidden_size: int = HIDDEN_SIZE) -> Any:
    return SimpleNamespace(dtype=dtype, hidden_size=hidden_size)


def microbatch(number: int = 1, *, tokens: int = 1) -> Forward:
    """A microbatch of one prompt of this many tokens."""
    return Forward(number, PREFILL, (Segment("r", 0, 0, (1,) * tokens, 0, (), False),))


def hidden_states(tokens: int = 1) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_arrives_as_it_was(private_dir: Path, dtype: torch.dtype) -> None:
    pair, hidden = ends_of(private_dir, dtype), hidden_states(5).to(dtype)
    pair[0].send(microbatch(tokens=5), hidden)
    received = pair[1].receive(microbatch(tokens=5))
    assert isinstance(received, torch.Tensor)
    assert received.dtype == dtype
    assert torch.equal(received, hidden)
    received += 1  # writable, its own memory
    for end in pair:
        end.close()


def test_a_slice_arrives_whole(pair: Pair) -> None:
    hidden = torch.arange(64.0).view(4, 2 * HIDDEN_SIZE)[:, ::2]
    pair[0].send(microbatch(tokens=4), hidden)
    received = pair[1].receive(microbatch(tokens=4))
    assert isinstance(received, torch.Tensor)
    assert torch.equal(received, hidden)


def test_a_tensor_that_no_socket_takes_at_once_arrives_whole(pair: Pair) -> None:
    """Its sender waits for the next stage, and every byte arrives."""
    hidden = hidden_states(MANY_TOKENS)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair[0].send, microbatch(tokens=MANY_TOKENS), hidden)
        received = pair[1].receive(microbatch(tokens=MANY_TOKENS))
        sent.result()
    assert isinstance(received, torch.Tensor)
    assert torch.equal(received, hidden)


def test_a_failure_arrives_in_order(pair: Pair) -> None:
    pair[0].send(microbatch(1), HiddenFailed(1, "broken"))
    pair[0].send(microbatch(2), hidden_states())
    assert pair[1].receive(microbatch(1)) == HiddenFailed(1, "broken")
    assert isinstance(pair[1].receive(microbatch(2)), torch.Tensor)


def test_another_microbatch_is_refused(pair: Pair) -> None:
    pair[0].send(microbatch(3), hidden_states())
    with pytest.raises(StepFailedError, match="expects microbatch 2, got 3"):
        pair[1].receive(microbatch(2))


@pytest.mark.parametrize(
    ("error_bytes", "follow", "text"),
    [
        (0, 12, "hidden states of 32 bytes must follow, got 12"),
        (0, 2**62, "hidden states of 32 bytes must follow, got 4611686018427387904"),
        (6, 10, "an error of at most 8192 bytes must follow, got 10"),
        (2**32 - 1, 2**32 - 1, "an error of at most 8192 bytes must follow, got 4294967295"),
    ],
)
def test_what_is_no_answer_to_the_plan_is_refused_at_once(pair: Pair, error_bytes: int, follow: int, text: str) -> None:
    """A05, A06: the plan says how many bytes come; none is waited for that was only announced. It names both stages."""
    assert pair[0]._target is not None
    pair[0]._target.sendall(FRAME_HEAD.pack(1, error_bytes, follow))
    with pytest.raises(StepFailedError, match=f"stage 1 cannot read the message of stage 0: for microbatch 1 {text}"):
        pair[1].receive(microbatch())


def test_an_error_of_any_length_arrives(pair: Pair) -> None:
    """A05: its beginning."""
    pair[0].send(microbatch(), HiddenFailed(1, "\u20ac" * 10**6))
    failed = pair[1].receive(microbatch())
    assert isinstance(failed, HiddenFailed)
    assert set(failed.error) == {"\u20ac"}


def test_a_neighbour_that_goes_away_ends_the_wait(pair: Pair) -> None:
    """A06: what it sent before still arrives."""
    pair[0].send(microbatch(), hidden_states())
    pair[0].close()
    assert isinstance(pair[1].receive(microbatch()), torch.Tensor)
    with pytest.raises(ProcessDiedError, match="stage-0 process died"):
        pair[1].receive(microbatch(2))


def test_what_is_sent_to_a_neighbour_that_is_gone_is_dropped(pair: Pair) -> None:
    """A06: the supervisor reports its end, not the stage before it."""
    pair[0].send(microbatch(1), hidden_states())
    assert isinstance(pair[1].receive(microbatch(1)), torch.Tensor)
    pair[1].close()
    pair[0].send(microbatch(2, tokens=MANY_TOKENS), hidden_states(MANY_TOKENS))


def test_the_end_of_the_scheduler_ends_the_wait(private_dir: Path) -> None:
    """A06: plans that come meanwhile do not."""
    scheduler = StageChannels([private_dir / "stage-1"])
    channel = StageChannel(private_dir / "stage-1")
    stage = SocketTransport(StageWires.local(private_dir, 1, 2), 1, facts(), CPU, scheduler=channel)
    before = SocketTransport(StageWires.local(private_dir, 0, 2), 0, facts(), CPU)
    scheduler.send(0, b"a plan")
    before.send(microbatch(1), hidden_states())
    assert isinstance(stage.receive(microbatch(1)), torch.Tensor)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.receive, microbatch(2))
        assert not wait([waiting], timeout=0.05).done
        scheduler.close()
        with pytest.raises(ProcessDiedError, match="scheduler process died"):
            waiting.result(WAIT_S)
    for end in (stage, before, channel):
        end.close()


segments = st.builds(
    Segment,
    rid=st.text(max_size=4),
    row=st.integers(0, 9),
    start=st.integers(0, 9),
    token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    page_start=st.integers(0, 3),
    pages=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    emits=st.booleans(),
    sampling=st.none() | st.builds(SamplingSpec, seed=st.integers(0, 2**63 - 1)),
)


@given(
    st.one_of(
        st.builds(
            Launch,
            st.builds(
                Forward,
                id=st.integers(0, 2**40),
                mode=st.sampled_from((PREFILL, DECODE, MIXED)),
                segments=st.lists(segments, max_size=3).map(tuple),
            )
            | st.builds(WeightUpdate, st.integers(0, 2**40), st.none() | st.text())
            | st.builds(ProfileSwitch, st.integers(0, 2**40), st.none() | st.text())
            | st.builds(LoraUpdate, st.integers(0, 2**40), st.builds(LoraChange, st.text())),
        ),
        st.builds(Describe, st.integers(0, 99)),
        st.builds(OrderLora, st.builds(LoraOrder, st.integers(0, 2**40), st.text(), st.none() | st.text())),
        st.just(FailNextStep()),
        st.just(Forget()),
        st.just(EndStage()),
    )
)
def test_every_stage_message_survives_the_wire(message: StageMessage) -> None:
    assert decode_stage_message(encode(message)) == message


def test_reports_are_told_amicrobatch() -> None:
    view = StageView(
        seq=1, stage=2, last_microbatch_id=-1, microbatches=0, failed=0, tokens=0, slots_written=0, slots_digest="d"
    )
    for report in (view, Completion(microbatch_id=4, token_ids=(1,))):
        assert decode_stage_report(encode(report)) == report


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", encode({"type": "Explode"})])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_stage_message(data)


def without_memory(error: Exception) -> Callable[..., torch.Tensor]:
    """Room for numbers, and none for hidden states."""
    empty = torch.empty

    def no_memory(shape: int | tuple[int, int], **options: object) -> torch.Tensor:
        if isinstance(shape, tuple):
            raise error
        return empty(shape, **options)  # type: ignore[call-overload, no-any-return]

    return no_memory


class Unaffordable:
    """Hidden states that there is no memory for, at either end."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def contiguous(self) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("can't allocate"), MemoryError("full")])
def test_hidden_states_without_memory_fail_their_microbatch(
    pair: Pair, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05: at the sender and at the receiver; the next microbatch comes as if nothing had been."""
    pair[0].send(microbatch(1), Unaffordable(error))  # type: ignore[arg-type]
    failed = pair[1].receive(microbatch(1))
    assert isinstance(failed, HiddenFailed)
    assert f"stage 0 could not hand on the hidden states of microbatch 1: {type(error).__name__}" in failed.error

    pair[0].send(microbatch(2), hidden_states())
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", without_memory(error))
        failed = pair[1].receive(microbatch(2))
    assert isinstance(failed, HiddenFailed)
    assert f"stage 1 could not take the hidden states of microbatch 2: {type(error).__name__}" in failed.error
    pair[0].send(microbatch(3), hidden_states())
    assert isinstance(pair[1].receive(microbatch(3)), torch.Tensor)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[DistributedTransport, DistributedTransport]:
    """Two ranks, with a queue in the place of the process group; a tensor is received whole or not at all."""
    wire: list[torch.Tensor] = []

    def receive(tensor: torch.Tensor, _: int) -> None:
        sent = wire.pop(0)
        assert tensor.shape == sent.shape, f"{tuple(sent.shape)} was sent, {tuple(tensor.shape)} is awaited"
        tensor.copy_(sent)

    monkeypatch.setattr("torch.distributed.send", lambda tensor, _: wire.append(tensor.clone()))
    monkeypatch.setattr("torch.distributed.recv", receive)
    first, second = (DistributedTransport(stage, facts(hidden_size=2), CPU, most_tokens=8) for stage in (0, 1))
    return first, second


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_ranks_without_memory_fail_their_microbatch(
    ranks: tuple[DistributedTransport, DistributedTransport], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05: what was sent is taken off the wire, so that the next microbatch is read where it begins."""
    ranks[0].send(microbatch(1, tokens=3), Unaffordable(error))  # type: ignore[arg-type]
    failed = ranks[1].receive(microbatch(1, tokens=3))
    assert isinstance(failed, HiddenFailed)
    assert f"stage 0 could not hand on the hidden states of microbatch 1: {type(error).__name__}" in failed.error

    ranks[0].send(microbatch(2, tokens=5), torch.zeros(5, 2))
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", without_memory(error))
        failed = ranks[1].receive(microbatch(2, tokens=5))
    assert isinstance(failed, HiddenFailed)
    assert f"stage 1 could not take the hidden states of microbatch 2: {type(error).__name__}" in failed.error
    ranks[0].send(microbatch(3, tokens=2), torch.ones(2, 2))
    received = ranks[1].receive(microbatch(3, tokens=2))
    assert isinstance(received, torch.Tensor)
    assert torch.equal(received, torch.ones(2, 2))
