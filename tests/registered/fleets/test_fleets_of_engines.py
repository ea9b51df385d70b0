"""Prefill and decode engines in one script: aborts, deaths, cut and slow links, updates, in every state of a transfer.

Goal: after any event between two engines each request ends once with the tokens of a run alone, and neither side keeps
anything. Method: one fleet a script, links that are held until the window is open. Origin: SGLang 29834 (abort during
bootstrap), 30053 and 28236 (aborts while KV is sent), TensorRT-LLM 13713 (an engine dies and the other waits), vLLM
39366 (one engine of several has other weights). Mutants: abort-untold-to-the-prefill-engine,
abort-does-not-stop-the-transfer, aborted-receiver-keeps-its-pages, kv-that-did-not-come-is-used,
late-only-beside-a-queue, cached-prefix-is-not-sent, an-update-leaves-what-waits-to-be-sent, sent-to-the-wrong-place,
delivered-and-never-told.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PrefillWanted
from scripted import scripted

register_cpu_ci(est_time=20, suite="base-cpu")

SMALL = EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=256)
FOUR = SMALL.model_copy(update={"pp_size": 4, "pp_async_depth": 2})
BOOTSTRAP = "the prefill engine has not heard of the prompt"
PART = "a part of the prompt has come, the rest is on its way"
NEITHER = "nothing comes any more, and nobody says so"
WAITS = "the prompt waits in the prefill engine for its weights to change"


def _drained(fleet, *names):
    for name in names:
        yield from fleet[name].run_until_idle()
        flush = fleet[name].flush_cache()
        yield
        yield
        assert flush.status == 200, f"{name} keeps something: {flush.text}"


@scripted(SMALL, must_reach=[BOOTSTRAP])
def test_an_abort_during_bootstrap(t):
    fleet = t.engines("p0", "d0")
    fleet.hold("d0", "p0")
    a = fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    yield from fleet["d0"].run_until(lambda: bool(fleet["d0"].state.transferring))
    t.sometimes(BOOTSTRAP, isinstance(fleet.on_its_way("d0", "p0")[0], PrefillWanted))
    fleet["d0"].abort(a)
    yield from fleet["d0"].run_until_finished(a)
    fleet.release("d0", "p0")
    yield from _drained(fleet, "p0", "d0")
    assert a.finish_reason == "abort"
    assert fleet["p0"].engine_stats().requests_finished == 0, "a prompt was computed for nobody"


@scripted(FOUR)
def test_a_prefix_is_hit_on_both_sides(t):
    fleet = t.engines("p0", "d0", "d1")
    for name, prompt, hit, saved in (("d0", 50, 0, 0), ("d0", 90, 48, 48), ("d1", 90, 0, 48 + 84)):
        r = fleet[name].start_req(prompt_len=prompt, max_new_tokens=3)
        yield from fleet[name].run_until_finished(r)
        assert (r.finish_reason, r.cached_tokens) == ("length", hit)
        yield from fleet["p0"].run_until_idle()
        assert fleet["p0"].engine_stats().cached_tokens == saved, "the prefill engine computed a prefix again"


@scripted(SMALL, must_reach=[PART])
def test_a_prefill_engine_dies_in_the_middle(t):
    fleet = t.engines("p0", "p1", "d0")
    a = fleet["d0"].start_req(prompt_len=70, max_new_tokens=4)
    yield from t.run_until(lambda: len(fleet["p0"].state.in_flight) > 0 and fleet["p0"].forward_ct == 4)
    fleet.hold_pages("p0", "d0")
    yield
    t.sometimes(PART, len(fleet.on_its_way("p0", "d0")) > 0)
    fleet.kill("p0")
    yield from fleet["d0"].run_until_finished(a)
    assert a.finish_reason == "length"
    computed = sum(record.microbatch.tokens for record in fleet["d0"].history if record.microbatch)
    assert 6 < computed < 70, "what came was computed again, or what did not come was not"
    b = fleet["d0"].start_req(prompt_len=30, prompt_seed=1, max_new_tokens=2)
    yield from fleet["d0"].run_until_finished(b)
    assert fleet["p1"].engine_stats().requests_finished == 1, "the next prompt goes to the engine that lives"


@scripted(SMALL, must_reach=[NEITHER])
def test_kv_that_is_late_is_computed_here(t):
    fleet = t.engines("p0", "d0")
    fleet.hold_pages("p0", "d0")
    a = fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    yield from t.run_until(lambda: bool(fleet["p0"].state.transferring))
    t.sometimes(NEITHER, not fleet["p0"].state.in_flight and len(fleet.on_its_way("p0", "d0")) > 0)
    t.clock.advance(30)
    yield from fleet["d0"].run_until_finished(a)
    fleet.release("p0", "d0")
    yield from _drained(fleet, "p0", "d0")
    assert a.finish_reason == "length", "late KV overwrote pages that were given to others, or was waited for"


@scripted(SMALL)
def test_a_cut_link_and_a_healed_one(t):
    fleet = t.engines("p0", "d0")
    fleet.slow("p0", "d0", 3)
    a = fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    yield from t.run_until(lambda: len(fleet.on_its_way("p0", "d0")) > 1)
    fleet.cut("p0", "d0")
    b = fleet["d0"].start_req(prompt_len=30, prompt_seed=1, max_new_tokens=2)
    yield from fleet["d0"].run_until_all_finished([a, b])
    yield from _drained(fleet, "p0")
    fleet.heal("p0", "d0")
    c = fleet["d0"].start_req(prompt_len=40, prompt_seed=2, max_new_tokens=2)
    yield from fleet["d0"].run_until_finished(c)
    assert [r.finish_reason for r in (a, b, c)] == ["length"] * 3
    assert fleet["p0"].engine_stats().requests_finished == 2, "of the second prompt the prefill engine never heard"


@scripted(SMALL, must_reach=[WAITS])
def test_an_update_ends_what_waits_for_the_weights_of_before(t):
    fleet = t.engines("p0", "d0")
    fleet["p0"].pause_generation("retract")
    a = fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    yield from fleet["p0"].run_until(lambda: len(fleet["p0"].state.waiting) == 1)
    t.sometimes(WAITS, fleet["p0"].state.running == [])
    update = fleet["p0"].update_weights("embedded:7")
    yield from fleet["p0"].run_until(lambda: update.done)
    fleet["p0"].continue_generation()
    yield from fleet["d0"].run_until_finished(a)
    assert update.status == 200
    assert fleet["p0"].engine_stats().requests_finished == 1, "the prompt was computed with other weights, or forgotten"
    assert a.finish_reason == "length"


@scripted(SMALL)
def test_two_decode_engines_have_the_same_numbers(t):
    fleet = t.engines("p0", "d0", "d1")
    a = fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    b = fleet["d1"].start_req(prompt_len=45, prompt_seed=1, max_new_tokens=4)
    yield from fleet["d0"].run_until_finished(a)
    yield from fleet["d1"].run_until_finished(b)
    yield from _drained(fleet, "p0", "d0", "d1")
    assert (a.finish_reason, b.finish_reason) == ("length", "length")
    assert fleet["p0"].engine_stats().requests_finished == 2


@scripted(SMALL)
def test_an_engine_that_comes_back_knows_nothing(t):
    fleet = t.engines("p0", "d0")
    fleet.hold_pages("p0", "d0")
    fleet["d0"].start_req(prompt_len=50, max_new_tokens=4)
    yield from t.run_until(lambda: bool(fleet["p0"].state.transferring))
    fleet.kill("d0")
    fleet.restart("d0")
    fleet.release("p0", "d0")
    b = fleet["d0"].start_req(prompt_len=50, prompt_seed=1, max_new_tokens=4)
    yield from fleet["d0"].run_until_finished(b)
    yield from _drained(fleet, "p0", "d0")
    assert b.finish_reason == "length", "KV for the engine of before came into the new one's pages"
