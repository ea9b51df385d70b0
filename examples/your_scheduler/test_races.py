"""Scripts for the fixed scheduler, as its owner would keep them."""

from scripted import scripted

ADAPTER = "examples/your_scheduler/fixed.py"


@scripted(adapter=ADAPTER, must_reach=["a batch of an aborted request is in flight"])
def test_a_flush_while_the_batch_of_an_aborted_request_is_in_flight(t):
    """The flush finds nothing in use; the result of the batch comes after it."""
    a = t.start_req(rid="a", prompt_len=4, max_new_tokens=1)
    yield
    t.abort(a)
    flush = t.flush_cache()
    yield
    t.sometimes("a batch of an aborted request is in flight", a.status == "aborted" and t.state.in_flight)
    assert flush.status == 200
    c = t.start_req(rid="c", prompt_len=5, max_new_tokens=1)
    yield from t.run_until_finished(c)


@scripted(adapter=ADAPTER, blocks=5, must_reach=["a preempted request computes again"])
def test_a_preempted_request_comes_back(t):
    """Two requests that do not fit together say what each says alone."""
    requests = [t.start_req(prompt_len=6, prompt_seed=seed, max_new_tokens=8) for seed in range(2)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes("a preempted request computes again", any(r.retractions and r.computed for r in requests))
    assert [r.finish_reason for r in requests] == ["length", "length"]
