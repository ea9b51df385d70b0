"""The inbox: arrival order, the bound on a step, frames that are no message; and the outbox beside it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import zmq

from engine.core.messages import Abort, CallAnswer, decode_replies, encode
from engine.process.inbox import MAX_MESSAGES_A_STEP, Inbox
from engine.server.scheduler_process.main import ReplySocket

ADDRESS = "inproc://requests"


@pytest.fixture
def inbox_and_sender():
    with zmq.Context() as context:
        inbox = Inbox(context, ADDRESS)
        sender = context.socket(zmq.PUSH)
        sender.setsockopt(zmq.SNDHWM, 0)
        sender.connect(ADDRESS)
        yield inbox, sender
        sender.close(linger=0)
        inbox.close()


def test_one_step_takes_up_to_the_bound_and_the_next_the_rest(inbox_and_sender) -> None:
    """A04: tested at bound + 1."""
    inbox, sender = inbox_and_sender
    for number in range(MAX_MESSAGES_A_STEP + 1):
        sender.send(encode(Abort(rid=str(number))))
    first = inbox.drain()
    assert [message.rid for message in first] == [str(number) for number in range(MAX_MESSAGES_A_STEP)]
    assert inbox.drain() == [Abort(rid=str(MAX_MESSAGES_A_STEP))]
    assert inbox.drain() == []


def test_frame_that_is_no_message_is_dropped_and_logged(inbox_and_sender, caplog: pytest.LogCaptureFixture) -> None:
    """A failure stays alone and never ends the process (A05)."""
    inbox, sender = inbox_and_sender
    not_utf8 = encode(Abort(rid="a?")).replace(b"a?", b"a\xff")
    answer = encode(CallAnswer(call_id="c", ok=True, message=""))
    for frame in (b"", b"\xc1", answer, not_utf8, encode(Abort(rid="a"))):
        sender.send(frame)
    with caplog.at_level(logging.WARNING):
        assert inbox.drain() == [Abort(rid="a")]
    assert len(caplog.records) == 4
    assert "not a client message" in caplog.text


def test_wait_is_bounded_and_ends_with_a_message(inbox_and_sender) -> None:
    inbox, sender = inbox_and_sender
    assert inbox.wait(0.001) is False
    sender.send(encode(Abort(rid="a")))
    assert inbox.wait(None) is True


def test_outbox_sends_a_steps_replies_in_one_frame_even_before_anybody_listens(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/replies"
    replies = (CallAnswer(call_id="a", ok=True, message="x"), CallAnswer(call_id="b", ok=False, message="y"))
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        outbox = ReplySocket(context, address)
        outbox.send(list(replies))
        receiver.bind(address)
        assert receiver.poll(30_000)
        assert decode_replies(receiver.recv()) == replies
        outbox.close()
