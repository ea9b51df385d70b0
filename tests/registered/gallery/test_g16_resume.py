"""G16: a retracted request comes back.

Goal: it recomputes its prompt and its output so far, and continues with the same tokens. Method: pause (retract) at
five points of its life, flush the cache so that nothing comes from it, continue; the token oracle compares. Origin:
vLLM pull request 28787; B06. Mutant: resume-cuts-the-output.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)


@pytest.mark.parametrize("stage", ["mid_decode", "first_chunk", "last_chunk", "first_decode", "last_decode"])
@scripted(ONE_STAGE)
def test_resume_after_retraction(t, stage):
    a = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=8)
    yield from t.advance_to_stage(a, stage)
    said = a.output_ids
    t.pause_generation("retract")
    yield
    yield from t.run_until(lambda: not t.state.in_flight)
    assert a.output_ids[: len(said)] == said
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200
    t.continue_generation()
    yield from t.run_until_finished(a)
    # The last token was in flight when the pause came: its result ends the request, and nothing is left to retract.
    assert a.retractions == (0 if stage == "last_decode" else 1)
    assert len(a.output_ids) == 8
    assert a.client.token_ids == a.output_ids
