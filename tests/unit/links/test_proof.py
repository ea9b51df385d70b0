"""The proof of the run's secret: who has it is known to the other, and nothing else passes for it."""

from __future__ import annotations

import struct

import pytest
from every_case import every_case

from engine.process.links.proof import (
    ANSWER_BYTES,
    GREETING_BYTES,
    PROTOCOL,
    Challenge,
    Claim,
    LinkError,
    Role,
    answer_to,
    confirms,
)
from engine.process.links.secret import MAC_BYTES, Secret

SECRET = Secret("a secret of the run, for tests")
OTHER = Secret("another secret, for tests")
CLAIM = Claim(Role.HIDDEN, 2)


def test_both_sides_learn_that_the_other_has_the_secret() -> None:
    challenge = Challenge(SECRET)
    assert len(challenge.greeting) == GREETING_BYTES
    answer = answer_to(challenge.greeting, SECRET, CLAIM)
    assert len(answer) == ANSWER_BYTES
    claim, confirmation = challenge.judge(answer)
    assert claim == CLAIM
    assert confirms(confirmation, SECRET, challenge.greeting, answer)
    assert not confirms(confirmation, OTHER, challenge.greeting, answer)
    assert not confirms(bytes(MAC_BYTES), SECRET, challenge.greeting, answer)
    # What the connecting side has sent does not confirm anything.
    assert not confirms(answer[-MAC_BYTES:], SECRET, challenge.greeting, answer)


def test_an_answer_is_of_one_challenge() -> None:
    """A recorded answer proves nothing the next time."""
    answer = answer_to(Challenge(SECRET).greeting, SECRET, CLAIM)
    with pytest.raises(LinkError, match="or replays an old answer"):
        Challenge(SECRET).judge(answer)


@every_case("place", range(ANSWER_BYTES))
def test_every_byte_of_an_answer_is_proved(place: int) -> None:
    """Including its role and its stage."""
    challenge = Challenge(SECRET)
    answer = bytearray(answer_to(challenge.greeting, SECRET, CLAIM))
    answer[place] ^= 1
    with pytest.raises(LinkError):
        challenge.judge(bytes(answer))


def test_another_secret_proves_nothing() -> None:
    challenge = Challenge(SECRET)
    with pytest.raises(LinkError, match="it has another secret"):
        challenge.judge(answer_to(challenge.greeting, OTHER, CLAIM))


def test_another_protocol_is_named_on_both_sides() -> None:
    challenge = Challenge(SECRET)
    newer = struct.pack("<H", PROTOCOL + 1)
    greeting = challenge.greeting[:8] + newer + challenge.greeting[10:]
    told = f"it speaks protocol {PROTOCOL + 1}, this side speaks {PROTOCOL}: run the same version on every machine"
    with pytest.raises(LinkError, match=told):
        answer_to(greeting, SECRET, CLAIM)
    answer = answer_to(challenge.greeting, SECRET, CLAIM)
    with pytest.raises(LinkError, match=told):
        challenge.judge(answer[:8] + newer + answer[10:])


def test_a_listener_of_something_else_gets_no_answer() -> None:
    with pytest.raises(LinkError, match="it is not a listener of this engine"):
        answer_to(b"HTTP/1.1 400 Bad Request".ljust(GREETING_BYTES), SECRET, CLAIM)
