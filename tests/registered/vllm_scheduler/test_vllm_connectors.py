"""vLLM's KV connectors: loads that fail, are held and offered again; two defects of the released version are found.

Goal: no request reads KV that did not arrive, and none waits forever. Method: schedules with a connector that does what
they say; a sweep of two workloads; the same with vLLM's classes alone. Origin: vLLM issues 45138 and 49250, and a
failed load that is offered again. Mutant: none; the released version has them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm import ADAPTER

from scripted.api import write_test
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.sdk.standalone import text_of
from scripted.search.campaign import Campaign
from scripted.search.execution import execute
from scripted.search.units import SearchPlan

register_cpu_ci(est_time=150, suite="vllm-cpu")

PAGE = (Path(__file__).parents[3] / "benchmarks/tables/defects.md").read_text(encoding="utf-8")
LOADS = "kv_connector=async kv_load_failure_policy=recompute"
# Version 2 of the runner does not go back after a failed load, whatever the scheduler does.
LOADS_NOW = "model_runner=1 kv_connector=sync kv_load_failure_policy=recompute"


@pytest.mark.parametrize(
    "text",
    [
        # One load brings a part; with each policy, and with the last token of the prompt in it.
        f"{LOADS}; 1 start a prompt=12 new=3; 1 fail-load block=1; 2 start b prompt=12 new=2",
        f"{LOADS} kv_load_failure_policy=fail; 1 start a prompt=12 new=3; 1 fail-load; 4 start b prompt=12 new=2",
        f"{LOADS_NOW}; 1 start a prompt=12 new=3; 1 fail-load; 2 start b prompt=12 new=2",
        f"{LOADS_NOW} kv_load_failure_policy=fail async_scheduling=True; 1 start a prompt=12 new=3; 1 fail-load",
        # Held, given up meanwhile, and asked for by a request of the same name.
        f"{LOADS}; 1 start a prompt=12 new=3; 2 hold-transfers; 4 abort a; 5 start a prompt=12 seed=1 new=2",
        # The connector cannot say; then it offers more than at first.
        f"{LOADS}; 1 offer tokens=-1; 1 start a prompt=12 new=3; 6 offer tokens=32; 7 start b prompt=9 seed=1 new=2",
        # Blocks of what has ended are kept until it is saved, and a flush is refused meanwhile.
        f"{LOADS_NOW} kv_saves=True kv_transfer_steps=6; 1 start a prompt=12 new=2; 4 flush; 5 flush force=True",
        # A request whose load is under way has begun, and goes on while no other begins.
        f"{LOADS}; 1 start a prompt=9 new=2; 2 pause mode=wait; 12 continue",
    ],
)
def test_what_a_connector_does_breaks_no_promise(text: str) -> None:
    outcome = execute(Schedule.parse(text, of="vllm"))
    assert outcome.failure is None
    assert not outcome.unreached


def test_what_stands_until_another_event_is_found_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded request waits for one that waits for its blocks, until a client aborts."""
    text = (
        "num_gpu_blocks=9 kv_connector=async; 1 start a prompt=9 new=10; 1 start d prompt=9; "
        "2 start b prompt=10 seed=1 new=10; 3 start c prompt=5 seed=2 new=8; 40 abort a"
    )
    schedule = Schedule.parse(text, of="vllm")
    assert execute(schedule).failure is None
    with ADAPTER.switched_on("loaded-behind-who-cannot-start"):
        found = execute(schedule).failure
        monkeypatch.setattr(Run, "_check_stands", lambda _: None)
        assert execute(schedule).failure is None, "the promise alone sees it"
    assert found is not None
    assert "waits forever: a (preempted since step 1)" in found.text
    assert found.step < 40


@pytest.mark.parametrize(
    ("workload", "what"),
    [("vllm-loads-tight", "something waits forever"), ("vllm-loads-now-async", "but alone it says")],
)
def test_the_search_finds_what_a_failed_load_leaves(workload: str, what: str) -> None:
    """Both findings need one failed load among the events of the workload."""
    report = Campaign(SearchPlan(targets=(workload,), stop_at_first=True, adapter="vllm")).run()
    (finding,) = report.findings.values()
    assert what in finding.failure.text
    assert "fail-load" in str(finding.schedule)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            (
                "num_gpu_blocks=7 max_model_len=24 kv_connector=async kv_load_failure_policy=recompute "
                "kv_offered_tokens=16; 1 start a prompt=16 new=1; 1 fail-load"
            ),
            "something waits forever: a",
        ),
        (
            # Blocks that a withdrawn plan would have filled stay in the prefix cache: vLLM's open pull request 43569.
            (
                "num_gpu_blocks=10 long_prefill_token_threshold=5 policy=priority; "
                "1 start a prompt=25 new=1; 2 start b prompt=9 new=1 seed=1 priority=1"
            ),
            "a reads the wrong KV",
        ),
        (
            f"async_scheduling=True {LOADS_NOW}; 1 start a prompt=9 new=3; 1 fail-load",
            "but has 9 tokens, those in flight included",
        ),
        (
            (
                "block_size=2 num_gpu_blocks=28 max_num_batched_tokens=4 sliding_window=3 enable_kv_cache_events=True "
                "kv_cache_report_mode=full; 1 start a prompt=8 new=1; 1 start b prompt=19 new=1 seed=1; "
                "1 start c prompt=5 new=1"
            ),
            "KV events announce 1 blocks of group 1 that are not in the prefix cache",
        ),
        ("kv_connector=async; 1 start a prompt=1 new=1", "a server would spin"),
        (
            (
                f"pipeline_parallel_size=2 max_num_batched_tokens=4 {LOADS_NOW} kv_offered_tokens=4; "
                "1 start a prompt=10 new=1; 1 fail-load"
            ),
            "but alone it says",
        ),
        (
            (
                "num_speculative_tokens=2 long_prefill_token_threshold=2; 1 start a prompt=5 new=1; "
                "4 start b prompt=5 new=1; 4 start c prompt=5 seed=1 new=1"
            ),
            "AssertionError",
        ),
        (f"{LOADS_NOW}; 1 start a prompt=5 new=1; 1 start b prompt=6 new=1; 1 fail-load; 2 abort a", "b says"),
        (
            (
                "mamba_cache_mode=align prefix_match_unit=2 enable_kv_cache_events=True kv_cache_report_mode=full; "
                "1 start a prompt=3 new=1; 2 start b prompt=3 new=1"
            ),
            "IndexError",
        ),
        ("kv_connector=async sliding_window=5 num_gpu_blocks=20; 1 start a prompt=8 new=1", "slot 3 of block 0"),
        (
            (
                "num_gpu_blocks=16 mamba_cache_mode=align kv_connector=sync kv_offered_tokens=16; "
                "1 start a prompt=28 new=3 seed=1; 1 start b prompt=16"
            ),
            "ValueError: Cannot get 1 free blocks",
        ),
        (
            (
                "decode_context_parallel_size=2 enable_kv_cache_events=True kv_cache_report_mode=full; "
                "1 start a prompt=8 new=1; 1 start b prompt=9 new=1"
            ),
            "AssertionError",
        ),
        (
            (
                "mamba_cache_mode=align mamba_checkpoint_alignment=2 prefix_match_unit=2; 1 start a prompt=11 new=1; "
                "1 start b prompt=17 new=1; 1 start c prompt=13 new=1"
            ),
            "continues from the wrong state",
        ),
        ("checks_sessions=False; 1 start a prompt=20 new=2 session=1; 8 more a tokens=16 new=2", "context of 32"),
    ],
)
def test_a_defect_on_the_page_is_there_and_is_written_with_the_classes_of_vllm_alone(text: str, what: str) -> None:
    """B15: each file is run where nothing of this project can be imported, and fails as the schedule does."""
    schedule = Schedule.parse(text, of="vllm")
    failure = execute(schedule).failure
    assert failure is not None
    assert what in str(failure)
    assert text.partition(";")[2].strip() in " ".join(PAGE.split())
    written = write_test(schedule, standalone=True)
    assert written.text is not None, written.said
    assert re.search("^(from|import) (scripted|engine)", written.text, re.MULTILINE) is None


def test_a_load_of_several_groups_that_fails_is_written() -> None:
    """vLLM gets the name of its request, not its blocks."""
    text = f"num_gpu_blocks=20 sliding_window=6 {LOADS}; 1 start a prompt=5 new=1; 1 fail-load"
    schedule = Schedule.parse(f"{text}; 1 start b prompt=21 new=1", of="vllm")
    written, _ = text_of(ADAPTER.standalone, schedule, "export")
    assert written is not None
    assert "failed_recving={'a@1'}" in written


def test_a_load_of_who_was_aborted_begins_nothing_of_who_has_the_name_now() -> None:
    """The second one is refused in the step in which the load of the first arrives."""
    text = "kv_connector=async kv_transfer_steps=3; 1 start a prompt=8; 2 abort a; 4 start a prompt=32"
    assert execute(Schedule.parse(text, of="vllm")).failure is None


def test_a_failed_load_of_who_was_aborted_fails_nothing_of_who_has_the_name_now() -> None:
    """Both loads end in one step, and vLLM gets the name of the first one's request."""
    text = f"num_gpu_blocks=20 sliding_window=3 async_scheduling=True {LOADS} kv_load_failure_policy=fail; "
    text += "1 start a prompt=2 new=1; 1 hold-transfers; 1 fail-load; 2 abort a; 3 start a prompt=2 new=1"
    assert execute(Schedule.parse(text, of="vllm")).failure is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (
            "block_size=2 num_speculative_tokens=2 num_gpu_blocks=28 mamba_cache_mode=align",
            "with Mamba layers block_size",
        ),
        (
            "num_gpu_blocks=20 mamba_cache_mode=align prefix_match_unit=1 circular_buffer_tokens=4",
            "must be a multiple of circular_buffer_tokens",
        ),
        ("num_gpu_blocks=28 sliding_window=6 swa_bounded_replay=True mamba_cache_mode=align", "allows no Mamba layers"),
        (
            "num_gpu_blocks=28 sliding_window=6 swa_bounded_replay=True attention_chunk_size=4",
            "no attention_chunk_size",
        ),
        ("num_gpu_blocks=28 sliding_window=5 swa_bounded_replay=True", "no sliding_window - 1 that is a multiple"),
        (
            "num_gpu_blocks=28 sliding_window=6 swa_bounded_replay=True circular_buffer_tokens=4",
            "must be a multiple of each ring",
        ),
    ],
)
def test_settings_of_no_model_are_refused(settings: str, rule: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=rule):
        Schedule.parse(f"{settings}; 1 start a prompt=1", of="vllm")
