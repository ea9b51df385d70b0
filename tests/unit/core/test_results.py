"""Completions in the hands of a script: due by default depth steps after the launch, held and released one by one."""

from __future__ import annotations

from scripted.core.results import Results


def results_of(*launches: int, depth: int = 2) -> Results:
    results = Results(depth)
    for number, step in enumerate(launches):
        results.launched(number, step)
    return results


def test_results_are_due_depth_steps_after_their_launch() -> None:
    results = results_of(1, 2, 3)
    assert list(results.take_due(2)) == []
    assert list(results.take_due(3)) == [0]
    assert list(results.take_due(9)) == [1, 2]
    assert results.due_steps() == {}


def test_held_results_wait_until_they_are_released_one_by_one() -> None:
    """Scripts hold and release what a scheduler meets (D09)."""
    results = results_of(1, 2, 3)
    results.hold()
    assert list(results.take_due(9)) == []
    results.release(2)
    assert list(results.take_due(9)) == [0, 1]
    assert list(results.take_due(9)) == []
    results.release(None)
    assert list(results.take_due(9)) == [2]


def test_release_of_one_does_not_hurry_it() -> None:
    results = results_of(1)
    results.hold()
    results.release(1)
    assert list(results.take_due(2)) == []
    assert list(results.take_due(3)) == [0]


def test_stalled_stage_holds_everything_and_order_stays() -> None:
    results = results_of(1, 2)
    results.stalled.add(1)
    assert list(results.take_due(9)) == []
    results.stalled.clear()
    assert list(results.take_due(9)) == [0, 1]


def test_a_cut_link_holds_everything_until_it_is_mended() -> None:
    results = results_of(1, 2)
    results.cut.add(0)
    assert list(results.take_due(9)) == []
    results.cut.clear()
    assert list(results.take_due(9)) == [0, 1]


def test_lost_results_never_come() -> None:
    """A dead server is reported with its cause, a hang with every stack (D06)."""
    results = results_of(1, 2)
    results.lose()
    assert list(results.take_due(9)) == []


def test_start_over_forgets_holds_and_stalls() -> None:
    """A reset that does not become quiet names what is in flight (D05)."""
    results = results_of(1)
    results.hold()
    results.stalled.add(0)
    results.start_over()
    results.launched(0, 1)
    assert list(results.take_due(3)) == [0]
