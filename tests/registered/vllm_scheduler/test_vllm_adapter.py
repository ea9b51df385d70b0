"""The adapter of vLLM's scheduler: its workloads pass, copies behave like originals, its declarations are true.

Goal: the search's findings are vLLM's own. Method: each workload by itself; schedules from their beginning and from a
copy; settings that make no engine; plans with gaps. Origin: review. Mutant: none; gaps are made by hand.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.adapter import ADAPTER, TRIED_VERSIONS
from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import new_request, new_scheduler
from scripted_vllm.left_out import why_left_out, why_looked_up_wrongly
from scripted_vllm.machine import VllmMachine
from scripted_vllm.runner_view import RunnerView
from scripted_vllm.versions import installed_version
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.adapters import adapter_named
from scripted.core.placed_action import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk import Share, Violation
from scripted.search.execution import Prefixes, execute
from scripted.search.strategies import extras_of

register_cpu_ci(est_time=15, suite="vllm-cpu")

REPOSITORY = Path(__file__).parents[3]
WORKLOADS = adapter_named("vllm").workloads
# Of all that differs between two schedulers: in flight, guessed, preempted by priority, of the first model runner.
COPIED = ("vllm-guesses-async-stages", "vllm-priority-guesses", "vllm-async-first-runner", "many")
EVERY_STEPS = 5


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_passes(name: str) -> None:
    outcome = execute(Schedule.parse(WORKLOADS[name], of="vllm"))
    assert outcome.failure is None
    assert not outcome.unreached


@pytest.mark.parametrize(
    ("settings", "prompt", "hangs"),
    [
        ("num_gpu_blocks=16 max_num_batched_tokens=4 mamba_cache_mode=align num_speculative_tokens=2", 9, True),
        ("num_gpu_blocks=16 max_num_batched_tokens=4 mamba_cache_mode=align num_speculative_tokens=2", 10, False),
        ("max_num_batched_tokens=4 num_speculative_tokens=2", 9, False),
    ],
)
def test_a_prompt_that_is_kept_clear_of_mtp_at_a_blocks_end_hangs(settings: str, prompt: int, *, hangs: bool) -> None:
    """The page of defects says so: one token is left behind the last block that the budget reaches."""
    outcome = execute(Schedule.parse(f"{settings} speculative_method=mtp; 1 start a prompt={prompt} new=2", of="vllm"))
    assert ("something waits forever: a (prefill)" in str(outcome.failure)) == hangs
    assert hangs or outcome.failure is None


@pytest.mark.parametrize(("blocks", "words"), [(20, "lost its blocks 7 times in a row for nothing"), (21, "")])
def test_a_lone_request_with_hisparse_needs_a_block_more_than_vllm_demands(blocks: int, words: str) -> None:
    """The page of defects says so."""
    host = "max_model_len=64 max_num_batched_tokens=8 enable_prefix_caching=False hisparse_host_blocks=24"
    outcome = execute(Schedule.parse(f"num_gpu_blocks={blocks} {host}; 1 start a prompt=60 new=2", of="vllm"))
    assert words in str(outcome.failure)
    assert bool(words) == (outcome.failure is not None)


@pytest.mark.skipif(installed_version() != "0.32.0", reason="the page of defects says: 0.33.0 passes")
@pytest.mark.parametrize(
    ("images", "guesses", "waits"),
    [
        (6, " num_speculative_tokens=1 speculative_method=eagle", True),
        (12, " num_speculative_tokens=1 speculative_method=eagle", False),
        (6, "", False),
    ],
)
def test_an_image_is_kept_for_a_drafter_that_needs_the_next_one(images: int, guesses: str, waits: bool) -> None:
    line = f"encoder_cache_size={images}{guesses}; 1 start a prompt=12 new=1 images=2 seed=1"
    outcome = execute(Schedule.parse(line, of="vllm"))
    assert ("waits forever: a (prefill)" in str(outcome.failure)) == waits
    assert waits == (outcome.failure is not None)


@pytest.mark.parametrize(
    ("blocks", "method", "words"),
    [(10, "eagle", "lost its blocks 8 times in a row for nothing"), (11, "eagle", ""), (10, "ngram", "")],
)
def test_a_prompt_is_admitted_without_the_block_that_its_drafter_reads_ahead(
    blocks: int, method: str, words: str
) -> None:
    """The page of defects says so: beside a load it preempts itself before its last chunk."""
    guesses = f"max_num_batched_tokens=8 num_speculative_tokens=3 speculative_method={method}"
    loaded = "kv_connector=async kv_offered_tokens=12 kv_transfer_steps=40; 1 start a prompt=13 new=1; 2 offer tokens=0"
    line = f"block_size=5 num_gpu_blocks={blocks} {guesses} {loaded}; 2 start b prompt=30 seed=1 new=1"
    outcome = execute(Schedule.parse(line, of="vllm"))
    assert words in str(outcome.failure)
    assert bool(words) == (outcome.failure is not None)


def test_prompts_below_a_threshold_have_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody waits, each of these prompts takes sixty steps, where one batch could hold it."""
    monkeypatch.setattr("scripted.core.promises.liveness._SLACK_STEPS", 1)
    settings = "num_gpu_blocks=100 max_model_len=64 max_num_batched_tokens=64 max_num_seqs=1"
    prompts = "; ".join(f"1 start r{at} prompt=60 new=1 seed={at}" for at in range(5))
    assert execute(Schedule.parse(f"{settings} long_prefill_token_threshold=1; {prompts}", of="vllm")).failure is None


def test_a_new_machine_leaves_vllms_log_silent() -> None:
    """Making vLLM's configuration sets its log's level again, and `scripted stuck` then printed the log first."""
    # A size of no other test: a configuration is made once for equal settings.
    VllmMachine(VllmSettings(num_gpu_blocks=77))
    assert not logging.getLogger("vllm").isEnabledFor(logging.ERROR)


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_goes_on_as_a_run_from_the_beginning_does(name: str) -> None:
    base = Schedule.parse(WORKLOADS[name], of="vllm")
    prefixes = Prefixes(base)
    assert prefixes.outcome.failure is None
    for step in range(2, prefixes.steps, EVERY_STEPS):
        for extra in extras_of(base):
            assert prefixes.execute(Placed(step, extra)) == execute(base.with_placed([Placed(step, extra)]))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ({"max_model_len": "64"}, "max_model_len must be from 2 to 48, the tokens of all blocks"),
        (
            {"enable_chunked_prefill": "False"},
            "without chunked prefill max_num_batched_tokens must be at least max_model_len",
        ),
        ({"async_scheduling": "True", "model_runner": "1", "pipeline_parallel_size": "2"}, "needs model_runner=2"),
        ({"num_speculative_tokens": "16"}, "max_num_batched_tokens must be greater than num_speculative_tokens"),
        (
            {"mamba_cache_mode": "align", "encoder_cache_size": "6", "disable_chunked_mm_input": "True"},
            "mamba_cache_mode=align allows no disable_chunked_mm_input",
        ),
        ({"block_sise": "4"}, "did you mean 'block_size'"),
    ],
)
def test_settings_that_make_no_engine_are_refused(words: dict[str, str], rule: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=rule):
        adapter_named("vllm").read_config(words)


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        (VllmSettings(), 1),
        (VllmSettings(async_scheduling=True, model_runner=1), 2),
        (VllmSettings(pipeline_parallel_size=3), 3),
        (VllmSettings(pipeline_parallel_size=2, async_scheduling=True), 3),
    ],
)
def test_as_many_batches_are_in_flight_as_vllm_has(
    settings: VllmSettings, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = new_scheduler(settings)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(settings.model_runner - 1))
    assert settings.depth == scheduler.vllm_config.max_concurrent_batches == depth


def test_what_vllm_refuses_is_no_target() -> None:
    """The configuration is made by the constructor that ``vllm serve`` uses."""
    text = "async_scheduling=True num_speculative_tokens=1 speculative_method=ngram; 1 start a prompt=1 new=1"
    with pytest.raises(ScriptDefinitionError, match="async scheduling is only supported"):
        execute(Schedule.parse(text, of="vllm"))


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        # Eight blocks for all of max_model_len, the window beside a batch, and where it begins within a block.
        ("sliding_window=3", 8 + 5 + 1),
        ("attention_chunk_size=4", 8 + 5),
        ("mamba_cache_mode=align num_speculative_tokens=2", 8 + 2 + 2),
        ("max_num_batched_tokens=8 sliding_window=3 num_speculative_tokens=3 speculative_method=mtp", 8 + 3 + 1),
        ("max_num_batched_tokens=8 hisparse_host_blocks=14", 8 + 2 + 1),
    ],
)
def test_a_pool_with_which_vllm_does_not_start_is_no_target(settings: str, needed: int) -> None:
    """The number is that of vLLM's own check at its start."""
    line = f"{settings}; 1 start a prompt=4 new=1"
    with pytest.raises(ScriptDefinitionError, match=f"which needs {needed} blocks; num_gpu_blocks={needed} has"):
        execute(Schedule.parse(f"num_gpu_blocks={needed} {line}", of="vllm"))
    assert execute(Schedule.parse(f"num_gpu_blocks={needed + 1} {line}", of="vllm")).failure is None


@pytest.mark.parametrize(("method", "retained"), [("mtp", 2), ("eagle", 0)])
def test_a_window_keeps_what_the_modules_of_a_drafter_compute_again(method: str, retained: int) -> None:
    """vLLM writes it into the windows of all layers at its start."""
    settings = VllmSettings(num_gpu_blocks=20, sliding_window=3, num_speculative_tokens=3, speculative_method=method)
    _, window = new_scheduler(settings).kv_cache_manager.coordinator.single_type_managers
    assert window.extra_retained_tokens == retained


def test_the_command_of_a_server_has_what_is_not_its_default() -> None:
    settings = VllmSettings(policy="priority", async_scheduling=True, kv_connector="async")
    command = ADAPTER.server.command(settings)
    assert command is not None
    assert command.line.startswith("vllm serve MODEL --block-size 4 ")
    assert "--scheduling-policy priority" in command.line
    assert "async-scheduling" not in command.line
    assert "scheduling_policy=priority (default fcfs)" in command.changed
    assert '"kv_load_failure_policy": "fail"' in command.line


def test_a_setting_that_no_flag_sets_is_named_once() -> None:
    settings = VllmSettings(kv_connector="async", kv_saves=True, kv_saves_aborted=True)
    command = ADAPTER.server.command(settings)
    assert command is not None
    assert command.beside == ("simulation: kv_saves=True", "simulation: kv_saves_aborted=True")


def plan(**more: Any) -> Any:
    nothing = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), all_token_ids={}, new_block_ids=[], num_computed_tokens=[]
    )
    values = {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": nothing,
        "num_scheduled_tokens": {},
        "scheduled_spec_decode_tokens": {},
        "finished_req_ids": set(),
        "preempted_req_ids": set(),
    }
    return SimpleNamespace(**values | more)


def new(rid: str, *blocks: int) -> Any:
    tokens = list(range(5))
    return SimpleNamespace(
        req_id=rid, prompt_token_ids=tokens, prefill_token_ids=tokens, block_ids=([*blocks],), num_computed_tokens=0
    )


def cached(rid: str, blocks: tuple[list[int], ...] | None, *, start: int, resumed: bool = False) -> Any:
    return SimpleNamespace(
        req_ids=[rid],
        resumed_req_ids={rid} if resumed else set(),
        all_token_ids={rid: list(range(7))} if resumed else {},
        new_block_ids=[blocks],
        num_computed_tokens=[start],
    )


def test_the_runner_keeps_block_tables_from_what_plans_say() -> None:
    runner = RunnerView(VllmSettings(model_runner=1), None)
    (first,) = runner.shares_of(plan(scheduled_new_reqs=[new("a", 3, 1)], num_scheduled_tokens={"a": 5}), ())
    assert first == Share(rid="a", start=0, count=5, block_ids=(3, 1), known_tokens=5)
    more = plan(scheduled_cached_reqs=cached("a", ([7],), start=5), num_scheduled_tokens={"a": 1})
    assert runner.shares_of(more, ())[0].block_ids == (3, 1, 7)
    same = plan(scheduled_cached_reqs=cached("a", None, start=6), num_scheduled_tokens={"a": 1})
    assert runner.shares_of(same, {"a"})[0].start == -1
    resumed = plan(scheduled_cached_reqs=cached("a", ([2, 4],), start=0, resumed=True), num_scheduled_tokens={"a": 7})
    assert runner.shares_of(resumed, {"a"})[0] == Share(rid="a", start=0, count=7, block_ids=(2, 4), known_tokens=7)


def started(version: int, *plans: Any) -> list[int]:
    """Return where each share of these plans begins."""
    runner = RunnerView(VllmSettings(model_runner=version, num_speculative_tokens=1), None)
    return [share.start for one in plans for share in runner.shares_of(one, ())]


@pytest.mark.parametrize(("version", "starts"), [(1, [0, 0, 0, 0]), (2, [0, 5, 0, 5])])
def test_version_2_goes_back_only_where_a_request_begins(version: int, starts: list[int]) -> None:
    """After a failed load the scheduler goes back; version 2 of the runner counts its own positions."""
    first = plan(scheduled_new_reqs=[new("a", 3, 1)], num_scheduled_tokens={"a": 5})
    back = plan(scheduled_cached_reqs=cached("a", None, start=0), num_scheduled_tokens={"a": 2})
    again = plan(finished_req_ids={"a"}, scheduled_new_reqs=[new("a", 5, 6)], num_scheduled_tokens={"a": 5})
    assert started(version, first, back, again, back) == starts


@pytest.mark.parametrize(("version", "start"), [(1, 0), (2, -1)])
def test_version_2_goes_on_where_its_guesses_ended(version: int, start: int) -> None:
    guessed = {"a": [9]}
    first = plan(
        scheduled_new_reqs=[new("a", 3, 1)], num_scheduled_tokens={"a": 6}, scheduled_spec_decode_tokens=guessed
    )
    back = plan(scheduled_cached_reqs=cached("a", None, start=0), num_scheduled_tokens={"a": 2})
    assert started(version, first, back, back) == [0, start, start]


@pytest.mark.parametrize(
    ("version", "first", "second", "what"),
    [
        (2, {}, {"num_scheduled_tokens": {"a": 1}}, "names neither its blocks nor its position"),
        (2, {}, {"scheduled_spec_decode_tokens": {"a": [1]}}, "guesses for a, but computes none of its tokens"),
        (2, {"preempted_req_ids": {"a"}}, {}, "continues a, which the runner .* has dropped"),
        (1, {"finished_req_ids": {"a"}}, {}, "continues a, which the runner .* has dropped"),
        (1, {}, {"scheduled_new_reqs": [new("a", 4)]}, "begins a, which the runner was not told to drop"),
    ],
)
def test_gaps_in_a_plan_are_found(version: int, first: dict[str, Any], second: dict[str, Any], what: str) -> None:
    runner = RunnerView(VllmSettings(model_runner=version), None)
    runner.shares_of(plan(scheduled_new_reqs=[new("a", 3)], num_scheduled_tokens={"a": 5}), ())
    runner.shares_of(plan(**first), ())
    goes_on = {} if second else {"scheduled_cached_reqs": cached("a", None, start=5), "num_scheduled_tokens": {"a": 1}}
    with pytest.raises(Violation, match=what):
        runner.shares_of(plan(**goes_on, **second), ())


def planned(settings: VllmSettings, *rids: str) -> tuple[Any, Any]:
    """Return a scheduler with requests of six tokens, and its first plan."""
    scheduler: Any = new_scheduler(settings)
    for seed, rid in enumerate(rids):
        scheduler.add_request(new_request(settings, rid, range(seed, seed + 6), max_tokens=2))
    return scheduler, scheduler.schedule()


def test_a_running_request_is_left_out_of_no_plan_with_tokens() -> None:
    """The scan of running requests goes on behind one that preempts itself."""
    settings = VllmSettings()
    scheduler, plan = planned(settings, "a", "b")
    assert why_left_out(plan, scheduler, settings, is_alone=True) == ""
    plan.total_num_scheduled_tokens -= plan.num_scheduled_tokens.pop("b")
    scheduler.requests["b"].num_computed_tokens = 0
    said = why_left_out(plan, scheduler, settings, is_alone=True)
    assert said == "b runs and has a token to compute, but is not in the plan: the plan has 10 tokens and 8 blocks left"
    scheduler.max_num_scheduled_tokens = 6
    assert why_left_out(plan, scheduler, settings, is_alone=True) == ""


@pytest.mark.parametrize(
    ("settings", "is_left_out"),
    [
        (VllmSettings(), True),
        (VllmSettings(max_num_seqs=1), False),
        (VllmSettings(num_gpu_blocks=9), False),
        (VllmSettings(max_num_batched_tokens=6), False),
        (VllmSettings(num_speculative_tokens=1), True),
    ],
)
def test_nobody_waits_beside_tokens_seats_and_blocks(settings: VllmSettings, is_left_out: bool) -> None:
    """A request that cannot begin yet ends no admission."""
    scheduler, plan = planned(settings, "a")
    # Longer than the six or seven blocks that are free in the small pool.
    for rid, tokens in (("b", 18), ("c", 9)):
        scheduler.add_request(new_request(settings, rid, range(tokens), max_tokens=2))
    scheduler.requests["b"].mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=0, length=5))]
    said = why_left_out(plan, scheduler, settings, is_alone=True)
    assert said.startswith("c waits, but the plan has 10 tokens and 10 blocks left") == is_left_out


def test_a_session_looks_up_hashes_of_its_own_tokens() -> None:
    settings = VllmSettings()
    one = new_request(settings, "a", range(10), max_tokens=2, session=True)
    plan: Any = SimpleNamespace(num_scheduled_tokens={"a": 10})
    assert why_looked_up_wrongly(plan, [one], settings) == ""
    one.block_hashes[1] = new_request(settings, "b", range(8, 18), max_tokens=2).block_hashes[1]
    said = "a looks up the prefix cache by hashes of other tokens than its own: 1 of 2, from hash 1 on"
    assert why_looked_up_wrongly(plan, [one], settings) == said


def test_each_module_of_a_drafter_reads_one_token_further_ahead() -> None:
    settings = VllmSettings(num_speculative_tokens=3, speculative_method="mtp")
    assert new_scheduler(settings).num_prefill_lookahead == 3
    assert new_scheduler(VllmSettings(num_speculative_tokens=3, speculative_method="eagle")).num_prefill_lookahead == 1
    command = ADAPTER.server.command(settings)
    assert command is not None
    assert '"method": "mtp"' in command.line


def test_the_version_is_stated_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_version() in TRIED_VERSIONS
    done = CliRunner().invoke(app, ["explore", "--adapter", "vllm", "--version-check"])
    assert (done.exit_code, done.output.strip()) == (
        0,
        f"vLLM {installed_version()} is installed; this adapter was tested with it",
    )
    monkeypatch.setattr("scripted_vllm.adapter.TRIED_VERSIONS", ("0.0.1",))
    done = CliRunner().invoke(app, ["explore", "--adapter", "vllm", "--version-check"])
    assert done.exit_code == 1
    assert "was tested with 0.0.1 and may not fit" in done.output


def test_events_that_say_too_much_are_found() -> None:
    """A block leaves the cache without an event."""
    machine = VllmMachine(VllmSettings(enable_kv_cache_events=True, sliding_window=6, num_gpu_blocks=20))
    scheduler = machine.scheduler
    coordinator, subscriber = scheduler.kv_cache_manager.coordinator, scheduler.kv_event_publisher
    subscriber.check(coordinator)
    subscriber.said.add((1, b"gone"))
    with pytest.raises(Violation, match="1 blocks of group 1 that are not in the prefix cache"):
        subscriber.check(coordinator)


def test_pages_in_a_pool_of_their_own_are_cached_there() -> None:
    """HiSparse's pages in host memory are announced with those of the device, and cached apart from them."""
    events = WORKLOADS["vllm-host-pages"].replace(
        "hisparse_host_blocks", "enable_kv_cache_events=True hisparse_host_blocks"
    )
    outcome = execute(Schedule.parse(events, of="vllm"))
    assert outcome.failure is None
