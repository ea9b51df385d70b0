"""A file of vLLM's own classes fails with the bug, and passes once it is mended, whatever the mended plans are.

Goal: its assertion is about the promise, and what depends on the plans is computed in the file. Method: each schedule
is written with a mutant on, and its file runs with the mutant and without it. Origin: review: 7 of 22 files stayed red
without the mutant. Mutant: masked-before-the-token-is-known, images-are-counted-one-by-one.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("this environment has no vLLM; `make vllm` makes one that has it", allow_module_level=True)

from scripted_vllm import ADAPTER

from scripted.core.schedule import Schedule
from scripted.sdk.standalone import text_of

register_cpu_ci(est_time=60, suite="vllm-cpu")

# vLLM and its imports emit warnings.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(
    ("mutant", "schedule", "asserted"),
    [
        (
            "masked-before-the-token-is-known",
            "structured_output=True async_scheduling=True; 1 start a prompt=1 grammar=1",
            "sampler.masked(schedule_3, ",
        ),
        (
            "images-are-counted-one-by-one",
            "encoder_cache_size=8 ec_connector=True; 1 start a prompt=12 new=1 seed=1 images=2",
            "scheduler.ec_connector.begin(2)",
        ),
        (
            "the-first-pause-counts",
            "default; 1 start a prompt=4 new=6; 2 pause mode=wait; 3 pause mode=keep",
            "assert not any(map(launches, [schedule_",
        ),
    ],
)
def test_a_file_is_red_with_the_bug_and_green_without(mutant: str, schedule: str, asserted: str) -> None:
    with ADAPTER.switched_on(mutant):
        text, why = text_of(ADAPTER.standalone, Schedule.parse(schedule, of="vllm"), "it")
        assert text is not None, why
        with pytest.raises(AssertionError):
            _run(text)
    assert asserted in text
    _run(text)


def test_no_file_is_written_of_a_flush_that_the_engine_core_left_out() -> None:
    """The file has the scheduler's classes alone, so it would be as red without the bug."""
    schedule = "enable_sleep_mode=True; 1 start a prompt=8 new=1; 3 sleep mode=abort; 4 wake; 5 start b prompt=8 new=1"
    with ADAPTER.switched_on("the-cache-outlives-the-sleep"):
        text, why = text_of(ADAPTER.standalone, Schedule.parse(schedule, of="vllm"), "it")
    assert (text, why) == (None, "a sleep's flush is EngineCore's, which no standalone file contains")


def _run(text: str) -> None:
    module = ModuleType("test_it")
    # vLLM imports connectors from their module.
    with mock.patch.dict(sys.modules, {"test_it": module}):
        exec(compile(text, "test_it.py", "exec"), vars(module))
        module.test_it()
