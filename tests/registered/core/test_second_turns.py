"""Second turns: prompts that continue an earlier prompt and its output, as every conversation does.

Goal: a turn hits all computed KV and nothing else; the last token of an output has no KV. Method: prompt and output
fill a page to the last slot; turns follow, branch, are cut, begin while the first one runs and after its abort. Origin:
vllm issue 54193; B13. Mutants: last-output-has-no-kv.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=64, page_size=PAGE)
BRANCHED = "two turns continue one request at once"


@scripted(ONE_STAGE)
def test_a_turn_computes_the_last_output_of_the_turn_before(t):
    first = t.start_req(prompt_len=PAGE - 3, max_new_tokens=3)
    yield from t.run_until_finished(first)
    second = t.start_req(after=first, prompt_len=PAGE + 2, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_finished(second)
    assert second.prompt_ids[:PAGE] == (*first.prompt_ids, *first.output_ids)
    assert second.cached_tokens == 0, "a hit on the last output, whose KV was never computed"
    third = t.start_req(after=second, max_new_tokens=2)
    yield from t.run_until_finished(third)
    assert third.cached_tokens == 2 * PAGE
    assert len(third.prompt_ids) == 2 * PAGE + 4


@scripted(ONE_STAGE, must_reach=[BRANCHED])
def test_turns_branch_are_cut_and_outlive_an_abort(t):
    first = t.start_req(prompt_len=PAGE - 4, max_new_tokens=4)
    yield from t.advance_to_decode_step(first, 1)
    early = t.start_req(after=first, prompt_len=1)
    assert early.prompt_ids[:-1] == (*first.prompt_ids, *first.output_ids)
    yield from t.run_until_finished(first)
    again = t.start_req(after=first, cut=0, max_new_tokens=4)
    edited = t.start_req(after=first, cut=2, prompt_len=3, prompt_seed=2)
    whole = t.start_req(after=first, prompt_len=3, prompt_seed=2)
    yield
    t.sometimes(BRANCHED, len(t.state.running) + len(t.state.in_flight) > 1)
    t.abort(edited)
    late = t.start_req(after=edited, prompt_len=2)
    yield from t.run_until_all_finished([early, again, edited, whole, late])
    assert again.output_ids == first.output_ids
    assert edited.prompt_ids[: PAGE - 2] == whole.prompt_ids[: PAGE - 2]
    assert len(late.prompt_ids) == len(edited.prompt_ids) + 2
