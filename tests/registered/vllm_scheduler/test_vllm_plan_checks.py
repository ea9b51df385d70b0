"""The checks in files of vLLM's own classes tell right plans from wrong ones: what blocks hold, what plans tell.

Goal: a file fails for the bug alone. Method: all plans of the workloads, and plans written by hand, each right but for
one thing. Origin: review: only exports ran these checks. Mutant: none; each wrong plan is accepted once its check goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("vLLM's plans need vLLM; `make vllm` installs it in an environment of its own", allow_module_level=True)

from scripted_vllm import ADAPTER
from scripted_vllm.config import VllmSettings
from scripted_vllm.kv_check import wrong_reads_in
from scripted_vllm.plan_check import gaps_in
from scripted_vllm.standalone import are_followed
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.sdk.standalone import Calls

register_cpu_ci(est_time=60, suite="vllm-cpu")

Tables = tuple[Sequence[int], ...]
# Blocks of two tokens.
FULL = SimpleNamespace(block_size=2, windows=(), states=())
WINDOW = SimpleNamespace(block_size=2, windows=((2, False),), states=())
CHUNK = SimpleNamespace(block_size=2, windows=((2, True),), states=())
STATES = SimpleNamespace(block_size=2, windows=(), states=(2,))
BOTH = SimpleNamespace(block_size=2, windows=((2, False),), states=(2,))
# Every prompt is [10, 11, 12, 13], so that requests share their first tokens; their answers differ.
OUTPUTS = {"a": [20, 21, 22, 23], "b": [30, 31, 32, 33]}


@dataclasses.dataclass
class Part:
    """What a plan says of one request. ``start`` is its position, None if the plan doesn't name it.

    ``told`` counts the tokens that the plan names: at the beginning those of the prompt.
    """

    rid: str
    tables: Tables | None
    start: int | None
    count: int
    told: int | None = None
    kind: str = "begins"
    lora: int = 0
    guesses: int = 0


def on(rid: str, tables: Tables | None, start: int, count: int, **more: Any) -> Part:
    return Part(rid, tables, start, count, kind="continues", **more)


def again(rid: str, tables: Tables | None, start: int, count: int, told: int) -> Part:
    return Part(rid, tables, start, count, told, kind="resumes")


def plan(*parts: Part, copies: Sequence[tuple[int, int]] = (), ended: str = "", preempted: str = "") -> SchedulerOutput:
    """Make a plan of vLLM's own class."""
    made, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
    for one in parts:
        told = [10, 11, 12, 13, *OUTPUTS[one.rid]][: 4 if one.told is None else one.told]
        tables = None if one.tables is None else tuple([[*table] for table in one.tables])
        if one.count:
            made.num_scheduled_tokens[one.rid] = one.count
        if one.guesses:
            made.scheduled_spec_decode_tokens[one.rid] = [0] * one.guesses
        if one.start is None:
            continue
        if one.kind == "begins":
            lora: Any = SimpleNamespace(lora_int_id=one.lora) if one.lora else None
            new = NewRequestData(one.rid, told, [], None, None, tables or (), one.start, lora, prefill_token_ids=told)
            made.scheduled_new_reqs.append(new)
            continue
        cached.req_ids.append(one.rid)
        cached.new_block_ids.append(tables)
        cached.num_computed_tokens.append(one.start)
        cached.all_token_ids |= {one.rid: told} if one.told else {}
        cached.resumed_req_ids |= {one.rid} if one.kind == "resumes" else set()
    made.scheduled_cached_reqs = cached
    made.kv_cache_block_copies = [
        SimpleNamespace(src_block_id=one, dst_block_id=other) for one, other in copies
    ] or None
    return dataclasses.replace(made, finished_req_ids=set(ended), preempted_req_ids=set(preempted))


# -- what blocks hold --

PROMPT = plan(Part("a", ([1, 2],), 0, 4))
B_TOO = Part("b", ([3, 4],), 0, 4)


@pytest.mark.parametrize(
    ("settings", "plans"),
    [
        # A prompt, then a token at a time in new blocks and in old ones.
        (FULL, [PROMPT, plan(on("a", ([5],), 4, 1)), plan(on("a", None, 5, 1))]),
        # In chunks.
        (FULL, [plan(Part("a", ([1],), 0, 2)), plan(on("a", ([2],), 2, 2))]),
        # A prefix hit, in the plan that computes the prefix too; then both write blocks of their own.
        (FULL, [PROMPT, plan(Part("b", ([1, 3],), 2, 2))]),
        (FULL, [plan(Part("a", ([1, 2],), 0, 4), Part("b", ([1, 3],), 2, 2))]),
        (FULL, [PROMPT, plan(on("a", ([5],), 4, 1), Part("b", ([1, 2, 6],), 4, 1))]),
        # A freed block is used again by who computes all of it.
        (FULL, [PROMPT, plan(Part("b", ([2, 1],), 0, 4), ended="a")]),
        # Preempted, then computed again in other blocks.
        (FULL, [PROMPT, plan(B_TOO, preempted="a"), plan(again("a", ([6, 2, 7],), 0, 5, told=5))]),
        (
            FULL,
            [
                *[PROMPT, plan(on("a", ([5],), 4, 1)), plan(Part("b", ([3, 4, 5],), 0, 5), preempted="a")],
                *[plan(again("a", ([1, 2, 6],), 0, 5, told=5)), plan(on("b", None, 5, 1))],
            ],
        ),
        # A copy, as after a hit within a block.
        (FULL, [PROMPT, plan(Part("b", ([1, 3],), 3, 1), copies=[(2, 3)])]),
        # A window's and a chunk's earlier blocks are not read.
        (WINDOW, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(on("a", ([5], [3]), 4, 1))]),
        (WINDOW, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(Part("b", ([1, 2, 5], [0, 4, 6]), 4, 1))]),
        (
            WINDOW,
            [
                *[plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(on("a", ([5], [6]), 4, 1))],
                plan(again("a", ([1, 2, 5], [0, 0, 6]), 5, 1, told=6)),
            ],
        ),
        (CHUNK, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(Part("b", ([1, 2, 5], [0, 0, 6]), 4, 1))]),
        # A state of the last share, and one at the end of a block that another request continues from.
        (STATES, [plan(Part("a", ([1, 2], [0, 3]), 0, 4)), plan(on("a", ([4], [5]), 4, 1))]),
        (STATES, [plan(Part("a", ([1], [3]), 0, 2)), plan(Part("b", ([1, 2], [3, 4]), 2, 2))]),
        (BOTH, [plan(Part("a", ([1, 2], [3, 4], [0, 5]), 0, 4)), plan(on("a", ([6], [7], [8]), 4, 1))]),
        (STATES, [plan(Part("a", ([1], [3]), 0, 1)), plan(Part("b", ([2], [4]), 1, 1), copies=[(1, 2), (3, 4)])]),
    ],
)
def test_who_reads_its_own_tokens_is_right(settings: Any, plans: list[Any]) -> None:
    assert wrong_reads_in(plans, OUTPUTS, settings) == []


@pytest.mark.parametrize(
    ("settings", "plans", "wrong"),
    [
        # A block that nobody wrote, one of the wrong positions, and one of another LoRA.
        (FULL, [PROMPT, plan(Part("b", ([7, 3],), 2, 2))], "b"),
        (FULL, [PROMPT, plan(Part("b", ([2, 3],), 2, 2))], "b"),
        (FULL, [PROMPT, plan(Part("b", ([1, 3],), 2, 2, lora=1))], "b"),
        # A stale block: what it holds was right for another answer, or before it was copied over.
        (FULL, [PROMPT, plan(on("a", ([5],), 4, 1)), plan(Part("b", ([1, 2, 5, 6],), 5, 1))], "b"),
        (FULL, [PROMPT, plan(on("a", None, 2, 2), copies=[(7, 1)])], "a"),
        # A freed block that somebody else has filled since.
        (FULL, [PROMPT, plan(Part("b", ([2, 1],), 0, 4)), plan(on("a", ([5],), 4, 1))], "a"),
        (FULL, [PROMPT, plan(Part("b", ([2, 1],), 0, 4)), plan(again("a", ([1, 3],), 2, 2, told=4))], "a"),
        # Two write the same block, in one plan or in turns; only one can be right.
        (FULL, [PROMPT, plan(on("a", ([5],), 4, 1), Part("b", ([1, 2, 5],), 4, 1))], "a"),
        (
            FULL,
            [PROMPT, plan(on("a", ([5],), 4, 1)), plan(Part("b", ([3, 4, 5],), 0, 5)), plan(on("a", None, 5, 1))],
            "a",
        ),
        # A hole: a position that no plan computes, of the request or of the hit's prefix.
        (FULL, [plan(Part("a", ([1, 2],), 0, 2)), plan(on("a", None, 3, 1))], "a"),
        (FULL, [plan(Part("a", ([1, 2],), 0, 3)), plan(Part("b", ([1, 2, 3],), 4, 1))], "b"),
        # One block too few, and the null block.
        (FULL, [plan(Part("a", ([1],), 0, 3))], "a"),
        (FULL, [plan(Part("a", ([0, 1],), 0, 4))], "a"),
        # A window that begins with a block of another request, and a chunk.
        (WINDOW, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(Part("b", ([1, 2, 5], [0, 7, 6]), 4, 1))], "b"),
        (WINDOW, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(Part("b", ([1, 2, 5], [0, 0, 6]), 4, 1))], "b"),
        (CHUNK, [plan(Part("a", ([1, 2], [3, 4]), 0, 4)), plan(Part("b", ([1, 2], [0, 0]), 3, 1))], "b"),
        # A state of one token less, one of another request, one overwritten by KV and KV overwritten by one.
        (STATES, [plan(Part("a", ([1, 2], [0, 3]), 0, 3)), plan(Part("b", ([1, 2, 4], [0, 3, 5]), 4, 1))], "b"),
        (STATES, [plan(Part("a", ([1, 2], [0, 3]), 0, 4)), plan(Part("b", ([1, 2, 4], [0, 7, 5]), 4, 1))], "b"),
        (
            STATES,
            [plan(Part("a", ([1], [3]), 0, 2)), plan(Part("b", ([3], [4]), 0, 2)), plan(on("a", ([5], [6]), 2, 1))],
            "a",
        ),
        (
            STATES,
            [plan(Part("a", ([1], [3]), 0, 2)), plan(Part("b", ([4], [1]), 0, 2)), plan(on("a", ([5], [6]), 2, 1))],
            "a",
        ),
        # A state over which KV is copied.
        (STATES, [plan(Part("a", ([1], [3]), 0, 2)), plan(on("a", ([4], [5]), 2, 1), copies=[(1, 3)])], "a"),
        # No block for the state after the share; and a state that two leave in one block.
        (STATES, [plan(Part("a", ([1, 2], [3]), 0, 4))], "a"),
        (STATES, [plan(Part("a", ([1, 2], [0, 3]), 0, 4), Part("b", ([4, 5], [0, 3]), 0, 3))], "a"),
    ],
)
def test_who_reads_something_else_is_found(settings: Any, plans: list[Any], wrong: str) -> None:
    assert wrong_reads_in(plans[:-1], OUTPUTS, settings) == []
    assert wrong_reads_in(plans, OUTPUTS, settings) == [wrong]


# -- what the runner is told --

BEGUN = plan(Part("a", ([1, 2],), 0, 4))


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize(
    "plans",
    [
        [BEGUN, plan(on("a", ([3],), 4, 1)), plan(on("a", None, 5, 1))],
        # In chunks; only the last of them samples a token.
        [plan(Part("a", ([1],), 0, 2)), plan(on("a", ([2],), 2, 2)), plan(on("a", ([3],), 4, 1))],
        # Both guesses are right, then both are wrong, then none are made.
        [BEGUN, plan(on("a", None, 4, 3, guesses=2)), plan(on("a", None, 7, 3, guesses=2)), plan(on("a", None, 8, 1))],
        # The copy of all tokens that a connector gets is not for the runner.
        [BEGUN, plan(on("a", None, 4, 1)), plan(on("a", None, 5, 1, told=4))],
        # A name is used again after its end, and resumed with all of its tokens.
        [BEGUN, plan(Part("a", ([1, 2],), 0, 4), ended="a")],
        [BEGUN, plan(again("a", ([1, 2],), 0, 5, told=5))],
        [BEGUN, plan(again("a", ([1, 2],), 0, 2, told=5)), plan(on("a", None, 2, 3)), plan(on("a", None, 5, 1))],
    ],
)
def test_a_runner_that_is_told_everything(plans: list[Any], runner: int) -> None:
    assert gaps_in(plans, runner) == []


@pytest.mark.parametrize(
    ("runner", "plans", "gap"),
    [
        (2, [plan(on("a", ([1],), 0, 1))], "a continues, but the runner does not have it"),
        (2, [BEGUN, plan(ended="a"), plan(on("a", None, 4, 1))], "a continues, but the runner does not have it"),
        (2, [BEGUN, plan(preempted="a"), plan(on("a", None, 4, 1))], "a continues, but the runner does not have it"),
        (1, [BEGUN, plan(again("a", None, 0, 5, told=5))], "a resumes without its blocks or its tokens"),
        (1, [BEGUN, plan(again("a", ([1, 2],), 0, 5, told=0))], "a resumes without its blocks or its tokens"),
        (2, [BEGUN, plan(Part("b", None, None, 1))], "b has neither blocks nor a position"),
        (2, [BEGUN, plan(Part("a", None, None, 0, guesses=1))], "a has guesses, but computes nothing"),
        # One token more than there is: of a prompt, after a sampled token, and after guesses that were all right.
        (2, [plan(Part("a", ([1, 2],), 0, 5))], "a computes position 4, but the runner has only 4 of its tokens"),
        (2, [BEGUN, plan(on("a", None, 4, 2))], "a computes position 5, but the runner has only 5 of its tokens"),
        (2, [BEGUN, plan(on("a", None, 5, 1))], "a computes position 5, but the runner has only 5 of its tokens"),
        (
            2,
            [BEGUN, plan(on("a", None, 4, 2, guesses=1)), plan(on("a", None, 7, 1))],
            "a computes position 7, but the runner has only 7 of its tokens",
        ),
        # Resumed with the tokens of its first chunk.
        (
            1,
            [BEGUN, plan(again("a", ([1, 2],), 0, 2, told=2)), plan(on("a", None, 2, 3))],
            "a computes position 4, but the runner has only 3 of its tokens",
        ),
    ],
)
def test_what_the_runner_is_not_told(runner: int, plans: list[Any], gap: str) -> None:
    assert gaps_in(plans[:-1], runner) == []
    assert gap in gaps_in(plans, runner)


def test_version_one_keeps_who_is_preempted() -> None:
    plans = [BEGUN, plan(preempted="a"), plan(on("a", None, 4, 1))]
    assert gaps_in(plans, 1) == []


# -- real plans --


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_connector": "sync"},
        {"encoder_cache_size": 8},
        {"num_speculative_tokens": 2},
        {"decode_context_parallel_size": 2},
        {"rswa_window": 8},
        {"num_gpu_blocks": 40, "sliding_window": 4, "swa_bounded_replay": True},
        {"num_gpu_blocks": 40, "circular_buffer_tokens": 4},
        {"num_gpu_blocks": 40, "hisparse_host_blocks": 16},
        {"num_gpu_blocks": 40, "mamba_cache_mode": "align", "mamba_checkpoint_alignment": 4},
    ],
)
def test_blocks_are_not_followed_with_these_settings(settings: dict[str, Any]) -> None:
    """What blocks hold depends on more than plans, or on the rank."""
    assert are_followed(VllmSettings())
    assert are_followed(VllmSettings(num_gpu_blocks=40, sliding_window=4))
    assert not are_followed(VllmSettings(**settings))


@pytest.mark.parametrize("name", ADAPTER.workloads)
def test_the_plans_of_a_workload_are_right(name: str) -> None:
    schedule = Schedule.parse(ADAPTER.workloads[name], of="vllm")
    run, calls = Run(schedule), Calls(ADAPTER.standalone)
    with calls.noted(run.machine):
        ADAPTER.drive(run)
    plans = [calls.results[one][0] for one in calls.named("schedule")]
    assert plans
    assert gaps_in(plans, schedule.config.model_runner) == []
    if are_followed(schedule.config):
        messages = [life.message for life in run.oracle.account.lives]
        outputs = {calls.names[one.rid]: list(one.alone(one.max_new_tokens)) for one in messages}
        assert wrong_reads_in(plans, outputs, schedule.config) == []
