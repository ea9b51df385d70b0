"""A split prompt with one and two new tokens.

Goal: one new token takes no decode step at all, two take exactly one. Method: count the microbatches by mode, on one
and on four stages. Origin: the chunked prefill tests of SGLang's scripted runtime; B02. Mutant:
every-chunk-emits-a-token.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@pytest.mark.parametrize("new_tokens", [1, 2])
@scripted(ONE_STAGE)
def test_single_decode_on_one_stage(t, new_tokens):
    yield from _count_decodes(t, new_tokens)


@pytest.mark.parametrize("new_tokens", [1, 2])
@scripted(PP4)
def test_single_decode_on_four_stages(t, new_tokens):
    yield from _count_decodes(t, new_tokens)


def _count_decodes(t, new_tokens):
    r = t.start_req(prompt_len=2 * CHUNK + 5, max_new_tokens=new_tokens)
    yield from t.run_until_finished(r)
    modes = [step.microbatch.mode.value for step in t.history if step.microbatch is not None]
    assert modes == ["prefill"] * 3 + ["decode"] * (new_tokens - 1)
    assert len(r.output_ids) == new_tokens
