"""Profiles of real servers, from the routes to the traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from real_servers import running

from engine.server.launch.preload import PreloadedParent

BODY = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_profile_has_a_trace_of_every_stage(stages: int, parent: PreloadedParent, tmp_path: Path) -> None:
    """C06: start, a request, stop; then the traces are there, in a folder that the answers name."""
    with running(parent, tmp_path, pp_size=stages, profile_dir=str(tmp_path / "traces")) as server:
        assert server.http.post("/stop_profile").status_code == 400
        started = server.http.post("/start_profile")
        again = server.http.post("/start_profile")
        server.http.post("/generate", json=BODY).raise_for_status()
        stopped = server.http.post("/stop_profile")
        assert [started.status_code, again.status_code, stopped.status_code] == [200, 400, 200]
        assert "POST /stop_profile first" in again.text
        folder = Path(re.fullmatch(r"wrote the profile into (.*)", stopped.text)[1])
        assert folder.parent == tmp_path / "traces"
        assert started.text == f"profiling into {folder}"
        traces = sorted(folder.iterdir())
        assert [trace.name for trace in traces] == [f"stage-{stage}.json" for stage in range(stages)]
        assert all(json.loads(trace.read_text())["traceEvents"] for trace in traces)
        server.http.post("/generate", json=BODY).raise_for_status()
