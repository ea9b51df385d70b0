"""G22: one row, two stages, and a prompt of three chunks.

Goal: a partly prefilled request advances although it holds the only row. Method: max_running_requests=1; a split
prompt, with another one after it. Origin: SGLang pull request 23006. Mutant: chunk-waits-for-a-free-row.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
ONE_ROW = EngineConfig(pp_size=2, chunked_prefill_size=CHUNK, max_running_requests=1)
WINDOW = "it holds the only row and has prompt left"


@scripted(ONE_ROW, must_reach=[WINDOW])
def test_a_split_prompt_advances_in_the_only_row(t):
    a = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=3)
    b = t.start_req(prompt_len=3 * CHUNK - 3, prompt_seed=1, max_new_tokens=3)
    yield from t.advance_to_nth_chunk(a, 1)
    t.sometimes(WINDOW, t.state.rows.free == 0 and a.is_chunking)
    yield from t.run_until_finished(a, max_steps=40)
    assert a.chunks_done == 3
    yield from t.run_until_finished(b, max_steps=40)
