"""Twists: what generated targets have beside features, in orders and amounts that are rarely drawn one by one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

import pytest

from scripted.adapters.lockstep.actions import HoldResults, Press, ReleaseResults, StartRequest
from scripted.adapters.lockstep.configs import limits_of
from scripted.adapters.lockstep.space import SPACE
from scripted.adapters.lockstep.twists import TWISTS, twisted
from scripted.core.named import OWN
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.generated import TWIST, Row, row_of

_ENDS: Final = ("abort", "disconnect", "pause")
_BASE: Final = "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=9 new=4"


def _drawn(row: Row, number: int) -> Schedule:
    """The first that makes a configuration."""
    while True:
        try:
            return SPACE.draw(row, random.Random(number))
        except ValueError:
            number += 1000


def _twist_of(twist: str, number: int) -> list[Placed]:
    schedule = Schedule.parse(_BASE, of=OWN)
    return list(twisted(twist, random.Random(number), schedule, limits_of(schedule.config)))


@pytest.mark.parametrize("twist", sorted(set(TWISTS)))
def test_a_twist_only_adds(twist: str) -> None:
    """What was found in a target without it is still there."""
    added = 0
    for number in range(20):
        row = row_of(number, OWN)
        plain, more = _drawn(row, number), _drawn({**row, TWIST: twist}, number)
        assert not Counter(plain.placed) - Counter(more.placed)
        added += plain != more
    assert added > 10


def test_the_first_targets_have_no_twist_and_of_the_others_one_in_three() -> None:
    twists = [row_of(number, OWN).get(TWIST) for number in range(1000, 1140)]
    assert twists[:20] == [None] * 20
    assert Counter(twists[20:]) == {"caught": 20, "crowd": 10, "pressed-again": 10, None: 80}


def test_what_is_in_flight_is_ended_while_results_are_held() -> None:
    """Bugs of two events on one microbatch were found late: an end, and something else, before its result is back."""
    for number in range(20):
        placed = _twist_of("caught", number)
        held = next(one.step for one in placed if isinstance(one.action, HoldResults))
        released = max(one.step for one in placed if isinstance(one.action, ReleaseResults))
        assert any(held < one.step < released and one.action.kind.startswith(_ENDS) for one in placed)


def test_in_a_crowd_nothing_fits_but_what_comes_last() -> None:
    """A step that gives up its queue one request too early had shown in no target."""
    starts = [one.action for one in _twist_of("crowd", 0) if isinstance(one.action, StartRequest)]
    first, *crowd, _ = [one.prompt for one in starts if not one.rid.startswith("t")]
    assert len(crowd) >= 14
    assert all(first + other > 40 for other in crowd)
    assert all(one.prompt <= 4 for one in starts if one.rid.startswith("t"))


def test_an_operator_asks_again_for_another_amount() -> None:
    """More rows than before: what is kept back had counted as owned, and no target asked twice."""
    drawn = [_twist_of("pressed-again", number) for number in range(9)]
    asked = [[one.action for one in placed if isinstance(one.action, Press)] for placed in drawn]
    assert all(len({one.kind for one in presses}) == 1 < len(presses) for presses in asked)
    assert sum(len({str(one) for one in presses}) > 1 for presses in asked) > 5
