"""G08: an abort between two chunks that meet in one page.

Goal: the page in which one chunk ends and the next begins is freed once. Method: pages of 16 tokens, chunks of 20;
abort after the first and after the second chunk. Origin: SGLang issue 38981; B11. Mutant:
abort-frees-a-shared-page-twice.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 20
ODD_CHUNKS = EngineConfig(chunked_prefill_size=CHUNK)
WINDOW = "the next chunk begins in the middle of a page"


@pytest.mark.parametrize("chunk", [2, 1])
@scripted(ODD_CHUNKS, must_reach=[WINDOW])
def test_abort_between_chunks_that_share_a_page(t, chunk):
    a = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(a, chunk)
    t.sometimes(WINDOW, a.is_chunking and chunk * CHUNK % t.state.kv.page_size)
    t.abort(a)
    yield from t.run_until_idle()
    assert a.finish_reason == "abort"
    assert t.state.kv.held == 0
    assert t.state.kv.free + t.state.kv.cached == t.state.kv.total
    b = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=4)
    yield from t.run_until_finished(b)
