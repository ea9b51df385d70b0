"""G28: the engine dies under its streams.

Goal: every stream ends with an error, not with silence and not with a normal end; later requests are refused. Method:
one request that runs, one that is partly prefilled, one that waits; kill a stage. Origin: roseinfer; A06, C06. Mutant:
death-looks-like-a-normal-end.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
WINDOW = "one runs, one is partly prefilled, one waits"


@scripted(PP4, must_reach=[WINDOW])
def test_a_death_ends_streams_with_an_error(t):
    runs = t.start_req(prompt_len=20, max_new_tokens=50)
    yield from t.advance_to_decode_step(runs, 2)
    prefills = t.start_req(prompt_len=6 * CHUNK, prompt_seed=1, max_new_tokens=4)
    waits = t.start_req(prompt_len=6 * CHUNK, prompt_seed=2, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(prefills, 2)
    t.sometimes(WINDOW, runs.status == "running" and prefills.is_chunking and waits.status == "waiting")
    t.kill_stage(1)
    yield
    for r in (runs, prefills, waits):
        assert r.client.finish_reason == "error", f"{r.rid} ended as if nothing had happened: {r.client}"
        assert r.client.terminal_answers == 1
        assert r.client.closed
    assert runs.client.token_ids == runs.output_ids
    refused = None
    try:
        t.start_req(prompt_len=20, max_new_tokens=2)
    except RequestRefused as exc:
        refused = exc
    assert refused is not None
    assert refused.status == 503


@scripted(PP4, tiers=("sim",), must_reach=["killed, and no step since"])
def test_nothing_is_taken_from_the_death_on(t):
    """A06: like a server's front end, which learns of a death when the scheduler does."""
    runs = t.start_req(prompt_len=20, max_new_tokens=50)
    yield from t.advance_to_decode_step(runs, 2)
    t.kill_stage(1)
    refused = []
    for verb in (lambda: t.start_req(prompt_len=20), t.flush_cache, lambda: t.abort(runs), lambda: t.wake()):
        try:
            verb()
        except RequestRefused as exc:
            refused.append((exc.status, "the stage-1 process died: it was killed by signal 9 (SIGKILL)" in str(exc)))
    t.sometimes("killed, and no step since", not runs.finished)
    assert refused == [(503, True)] * 4
    yield
    assert runs.finish_reason == "error"


@scripted(EngineConfig(pp_size=2, chunked_prefill_size=CHUNK), tiers=("server",), must_reach=[WINDOW])
def test_the_death_of_the_scheduler_ends_streams_with_an_error_that_names_it(t):
    """A06, C06: seen by clients that outlive the process; one has its first tokens, one waits for all of its answer."""
    runs = t.start_req(prompt_len=20, max_new_tokens=50)
    yield from t.advance_to_decode_step(runs, 2)
    prefills = t.start_req(prompt_len=6 * CHUNK, prompt_seed=1, max_new_tokens=4)
    waits = t.start_req(prompt_len=6 * CHUNK, prompt_seed=2, max_new_tokens=4, stream=False)
    yield from t.advance_to_nth_chunk(prefills, 2)
    flush = t.flush_cache(timeout_s=60)
    unseen = t.start_req(prompt_len=20, max_new_tokens=4)
    t.sometimes(WINDOW, runs.status == "running" and prefills.is_chunking and waits.status == "waiting")
    told = runs.client.token_ids
    t.kill_scheduler()
    for r in (runs, prefills, waits, unseen):
        assert r.client.finish_reason == "error", f"{r.rid} ended as if nothing had happened: {r.client}"
        assert "scheduler" in r.client.error
        assert r.client.terminal_answers == 1
        assert r.client.closed
    assert runs.client.token_ids == told
    assert flush.status in (500, 503), flush.text
    assert "scheduler" in flush.text
