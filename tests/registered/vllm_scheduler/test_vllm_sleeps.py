"""Sleep and wake on vLLM's own engine core, in each state of a pause, and requests between.

Goal: nothing is computed on a device whose memory is released, and no KV outlives the release. Method: schedules with
sleeps twice, wakes without a sleep and wakes of parts; the defects of the released version. Origin: vLLM issues 44395
and 48310, pull request 44483. Mutant: half-awake-goes-on, asleep-over-its-batches, the-cache-outlives-the-sleep,
a-pause-releases-the-memory, kv-memory-released-over-batches, the-cache-outlives-its-memory.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted.core.schedule import Schedule
from scripted.search.execution import execute

register_cpu_ci(est_time=15, suite="vllm-cpu")

PAGE = (Path(__file__).parents[3] / "benchmarks/tables/defects.md").read_text(encoding="utf-8")
NAPS = "enable_sleep_mode=True"
LATE_FORM = "1 start a prompt=1 new=1; 1 start b prompt=1 new=1 grammar=-1"


@pytest.mark.parametrize(
    "text",
    [
        # What sleeps is asleep until all of it is awake; requests that come meanwhile wait.
        f"{NAPS}; 1 start a prompt=9 new=5; 3 sleep mode=keep; 6 start b prompt=4; 9 wake part=weights; 10 wake",
        f"{NAPS}; 1 start a prompt=9 new=5; 3 sleep mode=wait; 4 start b prompt=4; 12 wake part=scheduling; 14 wake",
        # A wake without a sleep, and twice; sleep twice; in a pause, which it ends, and behind one.
        f"{NAPS}; 1 wake; 2 start a prompt=3; 4 pause mode=keep; 5 wake; 6 sleep mode=keep; 7 sleep mode=abort",
        f"{NAPS} async_scheduling=True; 1 start a prompt=9 new=9; 4 sleep mode=abort; 5 sleep mode=wait; 7 wake",
        f"{NAPS}; 1 start a prompt=9 new=5; 2 wake; 2 pause mode=keep; 5 sleep mode=keep; 8 wake; 9 start b prompt=9",
        # The next prompt like it finds nothing in the cache.
        f"{NAPS}; 1 start a prompt=12 new=2; 8 sleep mode=abort; 9 wake; 10 start b prompt=12",
        # Level 0 is a pause, after which the KV is there; the KV cache alone is released in a pause.
        f"{NAPS}; 1 start a prompt=9 new=5; 3 sleep mode=keep level=0; 5 start b prompt=4; 6 wake part=scheduling",
        f"{NAPS}; 1 sleep part=kv_cache; 2 start a prompt=9 new=2; 9 pause mode=abort; 11 sleep part=kv_cache; 12 wake",
        f"{NAPS}; 1 sleep mode=abort level=2; 2 sleep mode=abort; 3 sleep part=kv_cache; 4 wake; 5 start b prompt=9",
        # A pause that waits is answered by the plan after the last end, which only forgets what has ended.
        f"async_scheduling=True structured_output=True; {LATE_FORM}; 2 pause mode=wait; 3 continue",
    ],
)
def test_a_sleep_and_a_wake_break_no_promise(text: str) -> None:
    assert execute(Schedule.parse(text, of="vllm")).failure is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{NAPS}; 1 sleep mode=abort; 2 continue; 3 start a prompt=4", "batch 1 is launched while the device sleeps"),
        (
            f"{NAPS}; 1 start a prompt=4 new=3; 2 sleep mode=wait; 3 wake; 9 start b prompt=4",
            "is launched while the device sleeps: call-1",
        ),
    ],
)
def test_a_defect_on_the_page_is_there(text: str, what: str) -> None:
    failure = execute(Schedule.parse(text, of="vllm")).failure
    assert failure is not None
    assert what in failure.text
    assert text in " ".join(PAGE.split())
