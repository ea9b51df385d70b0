"""The benchmark's own pipelines stand in the place of the engine's: they have everything that a loop may ask for."""

from __future__ import annotations

import pytest

from benchmarks import live_gate
from engine.scheduler.ports import Pipeline

ASKED_FOR = [name for name in vars(Pipeline) if not name.startswith("_")]


@pytest.mark.parametrize("stand_in", [live_gate._NoPipeline, live_gate._Device])
def test_a_stand_in_has_what_a_pipeline_has(stand_in):
    assert "answer_source" in ASKED_FOR
    assert [name for name in ASKED_FOR if not hasattr(stand_in, name)] == []
