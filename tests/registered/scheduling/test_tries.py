"""The number of requests that do not fit and that a step tries.

Goal: past fifteen of them a later one that fits starts, past sixteen it does not. Method: a pool that is nearly full, a
queue of large prompts, and a small one as the last. Origin: B17. Mutant: one-try-less.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")


@scripted(EngineConfig(page_size=4, max_total_tokens=40, chunked_prefill_size=32), must_reach=["the pool is full"])
def test_fifteen_that_do_not_fit_are_passed_and_sixteen_are_not(t):
    """The bound on a step's tries; on both sides of it a request follows that would fit."""
    for misfits, starts in ((15, True), (16, False)):
        large = t.start_req(prompt_len=28, max_new_tokens=5, ignore_eos=True)
        yield
        t.sometimes("the pool is full", t.state.kv.free < 4)
        for i in range(misfits):
            t.start_req(prompt_len=13, prompt_seed=i + 1, max_new_tokens=1)
        fits = t.start_req(prompt_len=2, prompt_seed=60, max_new_tokens=1)
        yield
        yield
        assert (fits.status != "waiting") is starts
        assert not large.finished
        t.abort_all()
        yield from t.run_until_idle()
