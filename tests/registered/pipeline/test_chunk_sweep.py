"""Chunked prefill on four stages: every number of chunks beside every number of concurrent requests.

Goal: chunks of several requests interleave in the pipeline, and each output equals a run alone. Method: prompts a few
tokens short of whole chunks, so that every last chunk is partial; the token oracle compares. Origin: the four-stage
sweep of SGLang's scripted runtime; B01, B02, B06. Mutant: lock-refs-are-not-released.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")
register_cuda_ci(est_time=60, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@pytest.mark.parametrize("concurrent", [1, 2, 4])
@pytest.mark.parametrize("chunks", thinned([2, 4, 6, 8], one_in=2))
@scripted(PP4)
def test_chunks_of_concurrent_requests(t, chunks, concurrent):
    requests = [
        t.start_req(prompt_len=chunks * CHUNK - 3 - i, prompt_seed=i, max_new_tokens=4) for i in range(concurrent)
    ]
    most_in_flight = 0
    while not all(r.finished for r in requests):
        yield
        most_in_flight = max(most_in_flight, len(t.state.in_flight))
    assert most_in_flight > 1
    assert most_in_flight <= PP4.depth
    for r in requests:
        # A prompt that begins in the rest of another one's last chunk is cut once more.
        assert chunks <= r.chunks_done <= chunks + 1
        assert r.finish_reason == "length"
        assert len(r.output_ids) == 4
        assert r.client.token_ids == r.output_ids
    assert max(step.microbatch.tokens for step in t.history if step.microbatch is not None) <= CHUNK
