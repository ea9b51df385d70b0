"""Requests that follow one of their rid: each begins when the one before it ended by itself, and else ends with it."""

from __future__ import annotations

import pytest

from scripted.core.account import Account
from scripted.core.violation import Violation
from scripted.sdk.messages import Add


def account() -> Account:
    """Two requests of a session, of which the second came before the answer to the first."""
    lives = Account(32)
    lives.begin(Add(rid="a", prompt_ids=(1, 2), max_new_tokens=1, session=2))
    lives.begin(Add(rid="a", prompt_ids=(1, 2, 3), max_new_tokens=1, session=1), follows=True)
    return lives


def test_it_begins_when_the_one_before_it_has_ended() -> None:
    lives = account()
    lives.check_names()
    lives.live["a"].launched = True
    lives.tell("a", lives.lives[0].message.alone(1), "length")
    assert lives.live["a"] is lives.lives[1]
    assert not lives.is_settled


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_it_ends_with_one_that_is_cut_off(reason: str) -> None:
    lives = account()
    lives.abort("a")
    lives.fail(["a"])
    assert [life.failed for life in lives.lives] == [True, False]
    lives.tell("a", (), reason)
    assert [life.end for life in lives.lives] == [reason, reason]
    assert lives.is_settled


def test_what_does_not_follow_may_not_be_alive_beside_another_one() -> None:
    lives = account()
    lives.begin(Add(rid="a", prompt_ids=(1,), max_new_tokens=1))
    with pytest.raises(Violation, match="two requests of one rid are alive: a"):
        lives.check_names()
