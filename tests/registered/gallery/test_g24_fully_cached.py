"""G24: a prompt that is cached to its last token.

Goal: it still computes one token, and its lock refs do not climb. Method: the same page-aligned prompt three times,
the later two at once. Origin: pypto serving; B04. Mutant: cached-prompt-never-runs.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "every token of the prompt is cached"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_a_fully_cached_prompt_runs(t):
    first = t.start_req(prompt_len=64, max_new_tokens=3)
    yield from t.run_until_finished(first)
    t.sometimes(WINDOW, t.scheduler.memory.tree.match_length(first.prompt_ids) == 64)
    again = [t.start_req(prompt_len=64, max_new_tokens=3) for _ in range(2)]
    for r in again:
        yield from t.run_until_finished(r, max_steps=20)
        assert r.cached_tokens == 48
        assert r.output_ids == first.output_ids
    yield from t.run_until_idle()
    assert set(t.get_all_node_lock_refs().values()) == {0}
