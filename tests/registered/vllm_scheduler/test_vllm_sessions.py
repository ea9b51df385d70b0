"""Streaming sessions on vLLM's scheduler: a request that keeps its KV continues with more input. Its defects are found.

Goal: only new tokens are computed, on the kept KV, and a waiting session keeps no other request from ending. Method:
schedules and a script; the defects of the released version, also with vLLM's classes alone. Origin: vLLM pull requests
37843, 44526 and 49439, issue 52071. Mutant: as-long-as-the-first-answer; the released version has the defects.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.versions import installed_version

from scripted import scripted
from scripted.api import write_test
from scripted.core.errors import BadCall
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

register_cpu_ci(est_time=60, suite="vllm-cpu")

PAGE = (Path(__file__).parents[3] / "benchmarks/tables/defects.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        # Given up while it waits; ended and asked for again in one step; more of it while others may not begin.
        "default; 1 start a prompt=9 session=1; 8 abort a; 9 start a prompt=9 session=1; 16 more a tokens=4",
        "default; 1 start a prompt=6 session=1; 8 end-session a; 8 more a tokens=5; 9 start b prompt=9",
        "default; 1 start a prompt=6 session=1; 7 pause mode=wait; 8 more a tokens=5; 9 start b prompt=9; 20 continue",
        # Its blocks are not given up for a flush, and what is in flight when it stops is dropped.
        "default; 1 start a prompt=9 session=1; 7 flush; 8 flush force=True; 9 more a tokens=3; 10 flush force=True",
        "async_scheduling=True; 1 start a prompt=5 new=9 stop=50 session=1; 14 more a tokens=4 new=4",
        # Another one under its name, while it waits.
        "default; 1 start a prompt=5 session=1; 10 start a prompt=5 new=3 session=1; 18 more a tokens=2",
        "policy=priority; 1 start a prompt=9 session=1; 7 more a tokens=9 new=4; 8 start b prompt=12 priority=1",
        # More of it comes while it answers: it is queued, and ends with an answer that is cut off, not with one that
        # ends by itself.
        "default; 1 start a prompt=6 new=4 session=1; 3 more a tokens=5; 4 more a tokens=3; 5 end-session a",
        "default; 1 start a prompt=6 new=4 session=1; 3 more a tokens=5; 4 abort a; 6 start a prompt=3",
        "default; 1 start a prompt=6 new=9 session=1; 3 more a tokens=5; 4 pause mode=abort; 4 more a tokens=3",
        "default; 1 start a prompt=6 new=3 session=1; 2 end-session a; 2 more a tokens=3; 3 more a tokens=2",
        "async_scheduling=True; 1 start a prompt=6 session=1; 3 more a tokens=5 new=6; 4 flush force=True",
        # What does not fit beside it is computed again and again, until its client says that there is no more.
        "scheduler_reserve_full_isl=False; 1 start a prompt=15 new=3 session=1; 1 start b prompt=28 seed=1",
        "kv_connector=sync kv_load_failure_policy=fail; 1 start a prompt=9 session=1; 1 fail-load; 2 more a tokens=3",
        # All seats are of sessions that wait; one of them has given its name to a request that needs a seat.
        (
            "default; 1 start a prompt=1 new=1 session=1; 1 start b prompt=1 new=1 session=1; "
            "1 start c prompt=1 new=1 session=1; 1 start d prompt=1 new=1 session=1; 4 start a prompt=1 new=1"
        ),
        # The only one, whose blocks the request with its name needs.
        "mamba_cache_mode=align; 1 start a prompt=5 new=1 session=1; 5 start a prompt=29 new=1",
    ],
)
def test_a_session_goes_on_with_what_it_has(text: str) -> None:
    assert execute(Schedule.parse(text, of="vllm")).failure is None


@scripted(adapter="vllm", max_num_batched_tokens=8)
def test_the_second_answer_of_a_session_computes_what_is_new(t):
    """A handle for each answer; a client that sends more too early, or after the end, gets an error."""
    first = t.start_req(rid="talk", prompt_len=9, max_new_tokens=3, session=1)
    with pytest.raises(BadCall, match="needs a live session"):
        t.send_more("talk", 4)
    yield from t.run_until_finished(first)
    second = t.send_more("talk", 4, new=5)
    yield
    # The last token of the first answer is not a part of the session.
    assert second.prompt_ids[:11] == (*first.prompt_ids, *first.output_ids[:2])
    assert second.cached_tokens == 11
    yield from t.run_until_finished(second)
    t.end_session("talk")
    yield
    with pytest.raises(BadCall, match="needs a live session"):
        t.send_more("talk", 1)


@scripted(adapter="vllm", async_scheduling=True)
def test_what_is_queued_is_answered_after_the_answer_before_it(t):
    """A client sends faster than it is answered: each answer is that of its own input."""
    first = t.start_req(rid="talk", prompt_len=9, max_new_tokens=5, session=1)
    yield
    second = t.send_more("talk", 4, new=3)
    yield
    third = t.send_more("talk", 2, new=2)
    yield from t.run_until_finished(first)
    assert len(second.output_ids) == 0
    assert second.prompt_ids[9:13] == first.output_ids[:-1]
    yield from t.run_until_finished(third)
    assert (len(second.output_ids), len(third.output_ids)) == (3, 2)
    t.end_session("talk")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "num_speculative_tokens=3; 1 start a prompt=5 new=2 session=1; 6 more a tokens=3",
            "a computes positions 8 to 9",
        ),
        (
            (
                "num_gpu_blocks=9; 1 start a prompt=13 new=1 session=1; 1 start b prompt=13 new=1 seed=1 session=1; "
                "6 more a tokens=5; 6 more b tokens=5"
            ),
            "something waits forever: a (preempted), b (preempted)",
        ),
        (
            "pipeline_parallel_size=2 num_speculative_tokens=1; 1 start a prompt=5 new=4; 2 flush force=True",
            "a computes positions 5 to 5 with 1 guesses",
        ),
        (
            "pipeline_parallel_size=2 num_speculative_tokens=1; 1 start a prompt=1 new=1 session=1; 2 more a tokens=2",
            "a computes positions 3 to 3 with 1 guesses",
        ),
        (
            (
                "num_gpu_blocks=9 pipeline_parallel_size=2; 1 start a prompt=12 new=6 seed=1; "
                "1 start b prompt=9 new=5 session=1; 2 more b tokens=1"
            ),
            "something waits forever: b (preempted)",
        ),
        (
            "async_scheduling=True mamba_cache_mode=align; 1 start a prompt=9 stop=36 session=1; 2 more a tokens=1",
            "a continues from the wrong state",
        ),
        (
            (
                "num_gpu_blocks=16 mamba_cache_mode=align num_speculative_tokens=2; 1 start a prompt=9 new=3 "
                "session=1; 6 more a tokens=3"
            ),
            "a continues from the wrong state",
        ),
        ("rswa_window=3; 1 start a prompt=5 new=12 session=1; 16 more a tokens=4", "a reads the wrong KV"),
    ],
)
def test_a_defect_on_the_page_is_there_and_is_written_with_the_classes_of_vllm_alone(text: str, what: str) -> None:
    """B15: each file is run where nothing of this project can be imported, and fails as the schedule does."""
    if text.startswith(("num_speculative_tokens=3", "num_gpu_blocks=9 pipe")) and installed_version() != "0.32.0":
        pytest.skip("0.33.0 does not have it")
    schedule = Schedule.parse(text, of="vllm")
    failure = execute(schedule).failure
    assert failure is not None
    assert what in str(failure)
    assert text in " ".join(PAGE.split())
    written = write_test(schedule, standalone=True)
    assert written.text is not None, written.said
    assert re.search("^(from|import) (scripted|engine)", written.text, re.MULTILINE) is None
