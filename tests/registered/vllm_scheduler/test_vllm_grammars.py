"""Structured output, late guesses and LoRAs on vLLM's scheduler: what a grammar allows is said, from KV of its own.

Goal: masks are those of the tokens before them, however late these come. Method: a backend of vLLM's own manager whose
grammars allow each token in one state alone; schedules and scripts that hold grammars back, preempt and flush. Origin:
vLLM pull requests 29821 and 47312. Mutant: masked-before-the-token-is-known, late-guesses-are-left-out.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted import scripted
from scripted.core.errors import BadCall
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

register_cpu_ci(est_time=12, suite="vllm-cpu")

MASKED = "structured_output=True"
LATE = f"{MASKED} async_scheduling=True num_speculative_tokens=3"
STAGES = f"{MASKED} async_scheduling=True num_speculative_tokens=2 pipeline_parallel_size=2"


@pytest.mark.parametrize(
    "text",
    [
        # Held until nothing else is left to happen, given up meanwhile, and asked for by a request of the same name.
        f"{MASKED}; 1 hold-grammars; 1 start a prompt=9 grammar=1; 3 abort a; 4 start a prompt=5 grammar=1",
        # A client that hangs up between a plan and its masks; a call that has to wait until they are there.
        f"{LATE}; 1 start a prompt=5 new=9 grammar=1; 1 start b prompt=5 seed=1 new=9; 5 hold; 6 abort a; 6 flush",
        f"{LATE}; 1 start a prompt=5 new=9 grammar=1; 5 hold; 6 pause mode=keep; 7 start b prompt=5; 8 release",
        f"{LATE}; 1 start a prompt=9 new=9 grammar=1; 6 flush force=True; 8 flush force=True",
        f"{LATE} num_gpu_blocks=9; 1 start a prompt=9 new=12 grammar=1; 2 start b prompt=9 seed=1 new=12 grammar=1",
        f"{LATE} max_num_batched_tokens=5; 1 start a prompt=19 new=5 grammar=1; 2 start b prompt=9 new=9 grammar=1",
        # Right guesses that never reach the scheduler: the worker has those of the batch after.
        (
            f"{STAGES} kv_connector=sync num_gpu_blocks=12; 1 start a prompt=8 new=16 grammar=1; "
            f"10 start b prompt=4 new=12 grammar=1"
        ),
        # The guesses after rejected ones are those of the last token that holds.
        f"{STAGES}; 1 start a prompt=1 new=5 seed=1 grammar=1; 1 start b prompt=1",
        f"{STAGES}; 1 start a prompt=1 new=5 seed=1 grammar=1; 2 start b prompt=16 new=1",
        # One that does not compile ends with an error, and nothing else does.
        f"{MASKED} kv_connector=async; 1 start a prompt=9 grammar=-1; 1 start b prompt=9 seed=1 grammar=1",
        # Of three LoRAs two wait; a prefix is hit by its own alone.
        "max_loras=1; 1 start a prompt=9 new=6 lora=1; 1 start b prompt=9 lora=2; 2 start c prompt=9 lora=3; 4 abort a",
        f"max_loras=2 {LATE} policy=priority; 1 start a prompt=9 new=6 lora=1 grammar=1; 3 start b prompt=9 priority=1",
    ],
)
def test_what_a_request_brings_breaks_no_promise(text: str) -> None:
    outcome = execute(Schedule.parse(text, of="vllm"))
    assert outcome.failure is None
    assert not outcome.unreached


@scripted(
    adapter="vllm",
    structured_output=True,
    async_scheduling=True,
    num_speculative_tokens=2,
    must_reach=["a plan waits for its masks"],
)
def test_a_client_hangs_up_while_a_plan_waits_for_its_masks(t):
    """The plan is made, the result that its masks depend on is late, and one of its two requests is given up."""
    a = t.start_req(rid="a", prompt_len=5, max_new_tokens=8, grammar=1)
    b = t.start_req(rid="b", prompt_len=5, prompt_seed=1, max_new_tokens=8, grammar=1)
    while len(a.output_ids) < 2:
        yield
    t.hold_results()
    yield
    yield
    t.sometimes("a plan waits for its masks", len(t.state.in_flight) == 2)
    t.abort(a)
    yield
    t.release_results()
    yield from t.run_until_finished(b)
    assert (a.finish_reason, b.finish_reason) == ("abort", "length")


@scripted(adapter="vllm", structured_output=True, max_loras=1)
def test_a_grammar_that_is_late_and_one_that_fails(t):
    """Others overtake what waits for its grammar; a request that says what the adapter does not declare is refused."""
    t.hold_grammars()
    late = t.start_req(prompt_len=5, grammar=1, lora=1)
    wrong = t.start_req(prompt_len=5, grammar=-1)
    other = t.start_req(prompt_len=5, prompt_seed=1)
    yield from t.run_until_finished(other)
    assert not late.finished
    t.release_grammars()
    yield from t.run_until_finished(late)
    assert (late.finish_reason, wrong.finish_reason) == ("length", "error")
    with pytest.raises(BadCall, match="a lora from 0 to 3, got 4"):
        t.start_req(prompt_len=5, lora=4)


def test_settings_say_what_requests_may_bring() -> None:
    with pytest.raises(ScriptDefinitionError, match="grammar_steps and max_loras must not be negative"):
        Schedule.parse("max_loras=-1; 1 start a prompt=2", of="vllm")


@pytest.mark.parametrize("brings", ["lora=1", "grammar=1", "grammar=-1"])
def test_a_request_that_brings_what_the_settings_rule_out_is_refused(brings: str) -> None:
    assert execute(Schedule.parse(f"default; 1 start a prompt=5 {brings}", of="vllm")).failure is None
