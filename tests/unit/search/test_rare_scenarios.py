"""Rare scenarios of generated targets: orders and amounts that are rarely drawn one by one."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from typing import Final

import pytest
from scripted_lockstep.actions import Evict, Press, StartRequest
from scripted_lockstep.configs import limits_of
from scripted_lockstep.space.rare_scenarios import RARE_SCENARIOS, SCENES, least_spared, scenario_additions
from scripted_lockstep.space.targets import SPACE

from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search.covering import Row, covering_rows
from scripted.search.generated import SCENARIO, row_of

_ENDS: Final = ("abort", "disconnect", "pause")
_BASE: Final = "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=9 new=4"


def _drawn(row: Row, number: int) -> Schedule:
    """The first that makes a configuration."""
    while True:
        try:
            return SPACE.draw(row, random.Random(number))
        except ValueError:
            number += 1000


def _additions_of(scenario: str, number: int) -> list[Placed]:
    schedule = Schedule.parse(_BASE, of=DEFAULT_ADAPTER)
    return list(scenario_additions(scenario, random.Random(number), schedule, limits_of(schedule.config)))


@pytest.mark.parametrize("scenario", sorted(set(RARE_SCENARIOS)))
def test_a_scenario_only_adds(scenario: str) -> None:
    """Everything in a target without the scenario is still there."""
    added = 0
    for number in range(20):
        row = row_of(number, DEFAULT_ADAPTER)
        plain, more = _drawn(row, number), _drawn({**row, SCENARIO: scenario}, number)
        assert not Counter(plain.placed) - Counter(more.placed)
        added += plain != more
    assert added > 10


def test_the_first_targets_have_no_scenario_and_of_the_others_half() -> None:
    scenarios = [row_of(number, DEFAULT_ADAPTER).get(SCENARIO) for number in range(1000, 1116)]
    assert scenarios[:20] == [None] * 20
    drawn = Counter(str(scenario) for scenario in scenarios[20:])
    added = {"caught": 12, "pressed-again": 8, "crowd": 4}
    assert drawn == {**added, **dict.fromkeys(SCENES, 3), "None": 48}


def test_a_scene_takes_no_row_from_the_array() -> None:
    """Every two features meet as soon as without it."""
    rows = [row_of(number, DEFAULT_ADAPTER) for number in range(24, 28)]
    array = list(itertools.islice(covering_rows(SPACE.features, SPACE.allows, 0, triples=SPACE.triples), 27))
    assert [{key: row[key] for key in row if key != SCENARIO} for row in rows[:3]] == array[23:26]
    assert rows[3][SCENARIO] == "loads"
    assert "host" in rows[3]


def test_long_prompts_of_a_scene_are_worth_waiting_for() -> None:
    """No target had prompts that begin alike for long enough, and lost the first of them."""
    beyond: Counter[int] = Counter()
    for number in range(20):
        schedule = _drawn({"scale": "large", SCENARIO: "equals"}, number)
        starts = [one.action for one in schedule.placed if isinstance(one.action, StartRequest)]
        shared = [one.shared for one in starts if re.fullmatch(r"e\d", one.rid)]
        assert len(set(shared)) == 1 < len(shared)
        beyond[(shared[0] - least_spared(limits_of(schedule.config))) // schedule.config.page_size] += 1
    assert set(beyond) == {-1, 0, 1, 2}, "in pages, from too few on"


def test_a_prompt_of_a_scene_comes_again_from_the_host() -> None:
    for number in range(20):
        starts = [one.action for one in _drawn({"host": "large", SCENARIO: "loads"}, number).placed]
        prompts = {one.rid: one.prompt for one in starts if isinstance(one, StartRequest)}
        assert prompts["l0"] == prompts["l0-w"]
        assert any(isinstance(one, Evict) for one in starts)


def test_two_large_ones_are_passed_by_small_ones_that_end_one_by_one() -> None:
    """Outputs of one length end together, and leave room: only the first in line had ever waited too long."""
    pairs = 0
    for number in range(20):
        starts = [one.action for one in _additions_of("passed-over", number) if isinstance(one.action, StartRequest)]
        small = [start.new for start in starts if start.rid[0] == "r"]
        assert len(small) > 24
        assert len(set(small)) > 1
        pairs += len(starts) - len(small) > 1
    assert pairs > 10


def test_a_prefix_is_used_more_often_than_uses_are_kept() -> None:
    """The books of eviction are thinned when they have four entries for each node, and some: no target came so far.

    After all of the uses cached pages are evicted.
    """
    drawn = [_additions_of("used-often", number) for number in range(20)]
    uses = [
        [one for one in placed if isinstance(one.action, StartRequest) and one.action.rid[0] == "o"] for placed in drawn
    ]
    assert min(map(len, uses)) > 32
    assert sum(len(starts) > 64 + 4 * 3 for starts in uses) > 2
    for placed, starts in zip(drawn, uses, strict=True):
        (evict,) = [one for one in placed if isinstance(one.action, Evict)]
        assert evict.step == max(one.step for one in placed)
        assert evict.step > max(one.step for one in starts)


def test_what_is_in_flight_is_ended_while_results_are_held() -> None:
    """Bugs of two events on one microbatch were found late: an end, and something else, before its result is back."""
    for number in range(20):
        placed = _additions_of("caught", number)
        held = next(one.step for one in placed if isinstance(one.action, HoldResults))
        released = max(one.step for one in placed if isinstance(one.action, ReleaseResults))
        assert any(held < one.step < released and one.action.kind.startswith(_ENDS) for one in placed)


def test_in_a_crowd_nothing_fits_but_what_comes_last() -> None:
    """A step that gives up its queue one request too early had shown in no target."""
    starts = [one.action for one in _additions_of("crowd", 0) if isinstance(one.action, StartRequest)]
    first, *crowd, _ = [one.prompt for one in starts if not one.rid.startswith("t")]
    assert len(crowd) >= 14
    assert all(first + other > 40 for other in crowd)
    assert all(one.prompt <= 4 for one in starts if one.rid.startswith("t"))


def test_an_operator_asks_again_for_another_amount() -> None:
    """More rows than before: what is kept back had counted as owned, and no target asked twice."""
    drawn = [_additions_of("pressed-again", number) for number in range(9)]
    asked = [[one.action for one in placed if isinstance(one.action, Press)] for placed in drawn]
    assert all(len({one.kind for one in presses}) == 1 < len(presses) for presses in asked)
    assert sum(len({str(one) for one in presses}) > 1 for presses in asked) > 5
