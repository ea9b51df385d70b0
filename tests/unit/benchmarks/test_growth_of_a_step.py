"""How a step grows: the steps that are timed do the work of their row."""

from __future__ import annotations

import pytest

from benchmarks import growth


@pytest.mark.parametrize(("dimension", "size"), [("waiting requests", 10), ("running requests", 8)])
def test_a_point_is_measured_under_its_load(dimension: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_STEPS", 50)
    monkeypatch.setattr(growth.gc, "callbacks", [])
    engines: list[growth._Engine] = []
    made = growth._Engine.__init__
    monkeypatch.setattr(growth._Engine, "__init__", lambda one, config: (engines.append(one), made(one, config))[1])
    point = growth.measure_point(dimension, size)
    assert 0 < point.p50_us <= point.p99_us <= point.longest_us
    books = engines[0].scheduler.books
    loads = {"waiting requests": len(books.waiting), "running requests": len(books.running)}
    assert loads[dimension] in (size - 1, size)
