"""vLLM's scheduler under the search, for a CI that has vLLM: under a minute on one core, without a model or a GPU.

Lockstep installed beside vLLM (README, Install) changes no other package; then `pytest test_schedules.py`. Each test
adds one event of each kind in each step: an abort, a flush, a pause, another request. A finding is a line that
replays it.
"""

from __future__ import annotations

import pytest

from scripted import api

# The marker of vLLM's tests that need no GPU.
pytestmark = pytest.mark.cpu_test

SWEPT = (
    *("vllm-growing", "vllm-chunks-tight", "vllm-priority", "vllm-async-tight", "vllm-stages-async", "vllm-context"),
    *("vllm-guesses", "vllm-guesses-async", "vllm-eagle-windows", "vllm-windows-chunks", "vllm-windows-replayed"),
    *("vllm-grammars-guesses-async", "vllm-loras-tight", "vllm-images-tight", "vllm-saves", "vllm-attention-chunks"),
    *("vllm-mamba-async", "vllm-rings", "vllm-spread", "vllm-host-pages-async"),
)


@pytest.mark.parametrize("name", SWEPT)
def test_one_event_more_breaks_no_promise(name: str) -> None:
    report = api.explore(name, adapter="vllm")
    assert report.complete
    found = [f"scripted replay '{one.schedule}': {one.failure.text}" for one in report.findings.values()]
    assert not found, "\n".join(found)
