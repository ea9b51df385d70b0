"""The rows: the lowest first, each given back once."""

from __future__ import annotations

import pytest

from engine.errors import IntegrityError
from engine.integrity.memory import check_rows
from engine.memory import RowPool


def test_lowest_free_row_comes_first() -> None:
    rows = RowPool(3)
    assert [rows.allocate(), rows.allocate()] == [0, 1]
    rows.release(0)
    assert rows.allocate() == 0
    assert (rows.free, rows.is_taken(1), rows.is_taken(2)) == (1, True, False)
    check_rows(rows)


def test_row_is_released_once() -> None:
    rows = RowPool(2)
    row = rows.allocate()
    rows.release(row)
    with pytest.raises(IntegrityError, match="row 0 is free already"):
        rows.release(row)


def test_no_row_is_free() -> None:
    rows = RowPool(1)
    rows.allocate()
    with pytest.raises(IntegrityError, match="no row is free of 1"):
        rows.allocate()


def test_wrong_count_is_found() -> None:
    rows = RowPool(2)
    rows.free = 1
    with pytest.raises(IntegrityError, match="booked as \\(1, 0\\), but the rows say \\(2, 0\\)"):
        check_rows(rows)


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="total >= 1"):
        RowPool(0)


def test_more_rows_are_given_back_than_were_kept() -> None:
    rows = RowPool(3)
    rows.reserve(1)
    rows.release_reserved(5)
    assert (rows.free, rows.reserved) == (3, 0)
    check_rows(rows)
