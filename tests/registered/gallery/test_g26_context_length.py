"""G26: a request asks for more tokens than the context has.

Goal: ``context_length`` bounds prompt and output together and ends the request normally. Method: a limit of 16 tokens,
prompts of every length up to it, 26 new tokens asked for. Origin: pypto serving; B03. Mutants:
context-length-does-not-clamp, what-never-fits-is-admitted.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=2, suite="base-cpu")

LIMIT = 16
SHORT_CONTEXT = EngineConfig(chunked_prefill_size=64, context_length=LIMIT)


@scripted(SHORT_CONTEXT)
def test_context_length_ends_a_request(t):
    requests = [t.start_req(prompt_len=length, max_new_tokens=26) for length in (1, 4, 8, LIMIT - 1)]
    yield from t.run_until_all_finished(requests)
    for r in requests:
        total = len(r.prompt_ids) + len(r.output_ids)
        assert total == LIMIT, f"{r.rid} has {total} tokens, beyond context_length {LIMIT}"
        assert r.finish_reason == "length"


@scripted(SHORT_CONTEXT)
def test_a_prompt_that_fills_the_context_is_refused(t):
    refused = None
    try:
        t.start_req(prompt_len=LIMIT, max_new_tokens=1)
    except RequestRefused as exc:
        refused = exc
    assert refused is not None
    assert refused.status == 400
    assert f"context_length is {LIMIT}" in refused.body
    yield
