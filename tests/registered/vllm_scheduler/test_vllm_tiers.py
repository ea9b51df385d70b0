"""vLLM's bounded replay, which recomputes a window behind each hit, and HiSparse, whose pages are on the host.

Goal: the search reaches both, and finds it when one of their parts does nothing. Method: workloads, seen as their
batches, and as failures where a method of vLLM's is cut. Origin: issue 28. Mutant: made by hand in each test.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import Scheduler
from scripted_vllm.hisparse import SparseHost
from scripted_vllm.machine import VllmMachine

from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.sdk import Batch, Share
from scripted.search.execution import execute

register_cpu_ci(est_time=10, suite="vllm-cpu")

WORKLOADS = adapter_named("vllm").workloads
HOST = WORKLOADS["vllm-host-pages"]
COORDINATOR = "vllm.v1.hisparse.coordinator.HiSparseCoordinator"


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    seen: list[Batch] = []
    step = VllmMachine.step

    def noted(self: VllmMachine, *given: Any) -> Any:
        stepped = step(self, *given)
        seen.extend([stepped.microbatch] if stepped.microbatch is not None else [])
        return stepped

    monkeypatch.setattr(VllmMachine, "step", noted)
    return seen


def failure_of(text: str) -> str:
    failure = execute(Schedule.parse(text, of="vllm")).failure
    return "" if failure is None else failure.text


def shares_of(batches: list[Batch]) -> list[Share]:
    return [share for batch in batches for share in batch.shares]


@pytest.mark.parametrize("name", ["windows-replayed", "windows-replayed-async", "windows-replayed-loads"])
def test_a_window_is_computed_again_behind_a_hit(name: str, batches: list[Batch]) -> None:
    assert not failure_of(WORKLOADS[f"vllm-{name}"])
    again = [share for share in shares_of(batches) if share.start < share.rebuilt]
    assert again
    assert all(share.windows[0].first + share.windows[0].tokens == share.rebuilt for share in again)


def test_a_consumer_gets_its_windows_with_the_load(batches: list[Batch]) -> None:
    assert not failure_of(WORKLOADS["vllm-windows-replayed-pulled"])
    first = [share for share in shares_of(batches) if share.known_tokens is not None and share.start > 0]
    assert any(not share.rebuilt for share in first)


def test_a_replay_that_is_a_token_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Scheduler._mark_prefix_replay

    def late(self: Any, *given: Any, **named: Any) -> int:
        return max(0, int(mark(self, *given, **named)) - 1)

    monkeypatch.setattr(Scheduler, "_mark_prefix_replay", late)
    assert "reads the wrong KV" in failure_of(WORKLOADS["vllm-windows-replayed"])


def test_pages_are_read_from_the_host(batches: list[Batch]) -> None:
    assert not failure_of(HOST)
    host = Schedule.parse(HOST, of="vllm").config.num_gpu_blocks
    assert any(block >= host for share in shares_of(batches) for block in share.block_ids)
    assert any(batch.mirrored for batch in batches)


def test_rows_that_are_not_mirrored_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{COORDINATOR}.build_row_mirrors", lambda *_: ())
    assert "reads the wrong KV" in failure_of(HOST)


def test_pages_that_are_lost_and_not_said_to_be_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool gives a page to another request, and the workers go on reading it."""
    monkeypatch.setattr(f"{COORDINATOR}._lose_page", lambda *_: None)
    assert failure_of(WORKLOADS["vllm-host-pages-growing"])


def test_a_page_on_the_host_is_not_written_and_needs_a_region() -> None:
    tier = SparseHost(VllmSettings(hisparse_host_blocks=14, num_gpu_blocks=20, max_num_batched_tokens=8))
    tier._resident["a"] = {0: 0, 1: 7}
    assert tier.read_from("a", [[3, 4], [], [], [9]], 4, 6) == (23, 7)
    with pytest.raises(Exception, match="have no region for their rows"):
        tier.read_from("a", [[3, 4], [], [], []], 4, 6)
    with pytest.raises(Exception, match="page 0 is on the host only"):
        tier.read_from("a", [[3, 4], [], [], [9]], 3, 6)


def test_transfers_of_the_host_can_be_held() -> None:
    assert not failure_of(f"{HOST}; 3 hold-transfers; 14 release-transfers")
