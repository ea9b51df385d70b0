"""Back-pressure: one request more than the queue holds, and one choice more.

Goal: it is refused with 429 and the numbers, and leaves no state; of an answer no choice enters the queue then.
Method: one row, a queue of four, five requests after the one that runs, or two and an answer of three choices.
Origin: C07. Mutant: queue-has-no-limit.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=2, suite="base-cpu")

QUEUE_OF_FOUR = EngineConfig(chunked_prefill_size=64, max_running_requests=1, max_queued_requests=4)


@scripted(QUEUE_OF_FOUR)
def test_one_more_than_the_queue_holds_is_refused(t):
    runs = t.start_req(prompt_len=10, max_new_tokens=3)
    yield
    waiting = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=2) for i in range(4)]
    refused = None
    try:
        t.start_req(rid="too-many", prompt_len=10, max_new_tokens=2)
    except RequestRefused as exc:
        refused = exc
    assert refused is not None, "the queue took one too many"
    assert refused.status == 429
    assert "max_queued_requests is 4" in refused.body
    yield from t.run_until_all_finished([runs, *waiting])
    again = t.start_req(rid="too-many", prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(again)
    assert again.finish_reason == "length"


@scripted(QUEUE_OF_FOUR)
def test_no_choice_enters_where_not_all_fit(t):
    runs = t.start_req(prompt_len=10, max_new_tokens=3)
    yield
    waiting = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=2) for i in range(2)]
    yield
    with pytest.raises(RequestRefused, match="2 requests wait and 3 choices come, max_queued_requests is 4"):
        t.start_req(rid="r", prompt_len=10, max_new_tokens=2, n=3)
    yield
    assert [rid for rid in t.state.waiting if rid.startswith("r-")] == []
    fits = t.start_req(rid="r", prompt_len=10, max_new_tokens=2, n=2)
    yield from t.run_until_all_finished([runs, *waiting, fits])
    assert [choice.finish_reason for choice in fits.choices] == ["length", "length"]
