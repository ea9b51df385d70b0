"""An abort at every step of a request's life.

Goal: wherever the abort falls, the request ends once, with a reason, and all its memory is back as soon as nothing of
it is in flight. Method: the same split request repeatedly, aborted one step later each time until it ends before its
abort. Origin: the abort sweep of SGLang's scripted runtime; B11, B12. Mutants: abort-ignores-in-flight,
abort-and-finish-free-twice, dropped-result-leaks-its-slot, disconnect-aborts-nothing, waiting-requests-are-not-aborted.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=90, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
SEVERAL = "the abort fell on several places"


@scripted(ONE_STAGE, must_reach=[SEVERAL])
def test_abort_at_every_step_on_one_stage(t):
    yield from _sweep(t, t.abort, new_tokens=4)


@scripted(PP4, must_reach=[SEVERAL])
def test_abort_at_every_step_on_four_stages(t):
    yield from _sweep(t, t.abort, new_tokens=2)


@scripted(ONE_STAGE, must_reach=[SEVERAL])
def test_disconnect_at_every_step(t):
    yield from _sweep(t, t.disconnect, new_tokens=4)


def _sweep(t, end, *, new_tokens):
    places = set()
    for step in range(200):
        r = t.start_req(prompt_len=3 * CHUNK - 3, prompt_seed=step % 2, max_new_tokens=new_tokens)
        for _ in range(step):
            yield
        if r.finished:
            break
        places.add("new" if r.req is None else str(r.req.place))
        end(r)
        yield from t.run_until_finished(r, max_steps=1)
        yield from t.run_until_idle()
        assert r.finish_reason in ("abort", "length")
        t.evict()
        assert t.state.kv.free == t.state.kv.total
        assert t.state.rows.free == t.state.rows.total
    assert r.finish_reason == "length"
    t.sometimes(SEVERAL, places >= {"new", "chunked", "dispatched", "running"})
