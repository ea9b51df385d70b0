"""Windows that are computed again behind a prefix hit, and rows that are mirrored into other memory.

Goal: what is rebuilt is written into windows alone, and reads nothing before its first position; a mirror holds the
rows that its batch wrote, and no other. Method: plans written by hand. Origin: vLLM's bounded replay and HiSparse.
Mutant: in `Share.written`, begin each table at `start`; in `SimulatedRunner._mirror`, copy every row.
"""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, share

from scripted.sdk import Rows, Share, Violation, Window


def window(*blocks: int, first: int = 0) -> tuple[Window, ...]:
    return (Window(block_ids=blocks, tokens=4, first=first),)


def after_a_hit() -> PlannedRun:
    """Three requests of one prompt; the first has computed it."""
    run = PlannedRun()
    for rid in "abc":
        run.add(rid, prompt=12, new=2)
    run.launch("a", 0, 12, 1, 2, 3, windows=window(4, 5, 6))
    return run


def again(rid: str, *, table: tuple[int, ...], own: tuple[int, ...], first: int = 4, rebuilt: int = 8) -> Share:
    """Behind a hit of eight positions the last four are computed again."""
    return share(rid, 4, 8, *table, windows=window(0, *own, first=first), rebuilt=rebuilt)


def test_windows_are_rebuilt_beside_each_other() -> None:
    run = after_a_hit()
    run.step(again("b", table=(1, 2, 7), own=(9, 10)), again("c", table=(1, 2, 8), own=(11, 12)))


def test_what_is_not_rebuilt_is_written() -> None:
    run = after_a_hit()
    with pytest.raises(Violation, match="writes block 2 for b and for c"):
        run.step(
            again("b", table=(1, 2, 7), own=(9, 10), rebuilt=0), again("c", table=(1, 2, 8), own=(11, 12), rebuilt=0)
        )


def test_a_rebuilt_window_begins_with_its_first_position() -> None:
    run = after_a_hit()
    with pytest.raises(Violation, match="slot 1 of block 0, its position 1"):
        run.step(again("b", table=(1, 2, 7), own=(9, 10), first=0))


def test_the_first_group_must_hold_what_is_not_written_again() -> None:
    run = after_a_hit()
    with pytest.raises(Violation, match="slot 0 of block 13, its position 4"):
        run.step(again("b", table=(1, 13, 7), own=(9, 10)))


def test_rows_are_mirrored_and_read_where_they_are_kept() -> None:
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 4, 1), mirrored=(Rows(source=1, target=20, first=0, count=4),))
    run.take_result()
    run.step(share("a", 4, 4, 20, 2))


def test_a_row_that_its_batch_did_not_write_is_not_mirrored() -> None:
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.launch("a", 0, 2, 1)
    run.step(share("a", 2, 2, 1), mirrored=(Rows(source=1, target=20, first=0, count=4),))
    run.take_result()
    with pytest.raises(Violation, match="slot 0 of block 20, its position 0"):
        run.step(share("a", 4, 4, 20, 2))
