"""G20: more prompt tokens wait than one microbatch may hold.

Goal: no microbatch exceeds its token budget. Method: prompts that together, but not alone, are larger than the budget,
with and without decodes in the same microbatch; look at every step. Origin: TensorRT-LLM issue 13318; B02. Mutant:
budget-is-counted-per-request.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
MIXED = EngineConfig(chunked_prefill_size=CHUNK, mixed_chunk=True)
FULL = "a microbatch is full"
WITH_DECODES = "a full microbatch has decodes in it"


@scripted(ONE_STAGE, must_reach=[FULL])
def test_a_batch_keeps_to_its_budget(t):
    requests = [t.start_req(prompt_len=40, prompt_seed=i, max_new_tokens=3) for i in range(4)]
    yield from t.run_until_all_finished(requests)
    sizes = [step.microbatch.tokens for step in t.history if step.microbatch is not None]
    t.sometimes(FULL, CHUNK in sizes)
    assert max(sizes) <= CHUNK
    assert sum(sizes) >= 4 * (40 + 2)


@scripted(MIXED, must_reach=[WITH_DECODES])
def test_a_mixed_batch_keeps_to_its_budget(t):
    first = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=12) for i in range(3)]
    yield from t.run_until(lambda: len(t.state.running) == 3)
    second = [t.start_req(prompt_len=40, prompt_seed=9 + i, max_new_tokens=3) for i in range(4)]
    yield from t.run_until_all_finished([*first, *second])
    batches = [step.microbatch for step in t.history if step.microbatch is not None]
    assert max(batch.tokens for batch in batches) <= CHUNK
    mixed = [batch for batch in batches if batch.mode == "mixed"]
    t.sometimes(WITH_DECODES, any(batch.tokens > CHUNK - 16 for batch in mixed))
