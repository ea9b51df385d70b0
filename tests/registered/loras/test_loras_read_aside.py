"""The stages read a LoRA beside the computation: other requests go on, and nothing meets a LoRA that is half read.

Goal: the end of a reading is an event like any other, in every order with aborts, unloads, updates, sleeps and pauses;
one that fails changes nothing. Method: hold the reading, and let these happen meanwhile. Origin: a server whose streams
stood still while 100 MB were read; A05, B12. Mutants: lora-taken-before-it-is-read, read-lora-wakes-nobody.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=10, suite="base-cpu")

CONFIG = EngineConfig(lora="x=embedded-lora:1,y=embedded-lora:2", max_loras=1, chunked_prefill_size=32)
FOUR_STAGES = CONFIG.model_copy(update={"pp_size": 4, "pp_async_depth": 1})
ENOUGH_STEPS = 24


def _held(t):
    """Return the names of the LoRAs that the stages hold, according to the plans."""
    return [name for name, lora in t.scheduler.features.loras.known.items() if lora.version]


def _goes_on(t):
    long = t.start_req(prompt_len=20, max_new_tokens=10, ignore_eos=True)
    yield from t.advance_to_decode_step(long, 2)
    t.hold_loras()
    waits = t.start_req(prompt_len=20, max_new_tokens=2, ignore_eos=True, lora="x")
    load = t.load_lora("z", "embedded-lora:3")
    yield from t.run_until_finished(long)
    assert not load.done, "a LoRA that was not read was loaded"
    assert waits.status == "waiting"
    t.release_loras()
    yield from t.run_until(lambda: load.done)
    assert load.status == 200, load.text
    for _ in range(ENOUGH_STEPS):
        yield
    assert waits.finished, "its LoRA was read, and it was not woken"


@scripted(CONFIG)
def test_a_stream_goes_on_while_a_lora_is_read(t):
    yield from _goes_on(t)


@scripted(FOUR_STAGES)
def test_a_stream_goes_on_while_four_stages_read(t):
    yield from _goes_on(t)


@scripted(FOUR_STAGES)
def test_a_request_that_is_aborted_meanwhile_leaves_what_is_read(t):
    first = t.start_req(prompt_len=40, max_new_tokens=2, lora="x")
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    t.hold_loras()
    gone = t.start_req(prompt_len=40, max_new_tokens=2, lora="y")
    yield
    t.abort(gone)
    yield
    assert gone.finish_reason == "abort"
    t.release_loras()
    yield from t.run_until_idle()
    assert _held(t) == ["y"], "what was read is lost"
    again = t.start_req(prompt_len=40, max_new_tokens=2, lora="x")
    yield from t.run_until_finished(again)
    assert again.output_ids == first.output_ids


@scripted(FOUR_STAGES)
def test_an_unload_meanwhile_follows_the_reading(t):
    t.hold_loras()
    r = t.start_req(prompt_len=40, max_new_tokens=2, lora="x")
    yield
    t.abort(r)
    unload = t.unload_lora("x")
    yield
    assert not unload.done, "a LoRA that is being read was unloaded"
    t.release_loras()
    yield from t.run_until(lambda: unload.done)
    assert unload.status == 200, unload.text
    assert _held(t) == []


@scripted(FOUR_STAGES)
def test_an_update_meanwhile_does_not_wait(t):
    t.hold_loras()
    r = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True, lora="x")
    yield
    update = t.update_weights("embedded:7")
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, update.text
    assert r.status == "waiting"
    t.release_loras()
    yield from t.run_until_finished(r)
    base = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True)
    yield from t.run_until_finished(base)
    assert base.output_ids != r.output_ids, "the LoRA changes nothing"


@scripted(CONFIG)
def test_what_is_read_in_a_sleep_is_taken_after_it(t):
    t.hold_loras()
    r = t.start_req(prompt_len=20, max_new_tokens=2, lora="x")
    yield
    sleep = t.sleep()
    yield from t.run_until(lambda: sleep.done)
    t.release_loras()
    for _ in range(ENOUGH_STEPS):
        yield
    assert _held(t) == [], "a sleeping stage took a LoRA"
    t.wake()
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length"


@scripted(CONFIG)
def test_a_pause_does_not_keep_what_was_read(t):
    t.hold_loras()
    r = t.start_req(prompt_len=20, max_new_tokens=2, lora="x")
    yield
    t.pause_generation("retract")
    yield
    t.release_loras()
    yield from t.run_until(lambda: _held(t) == ["x"])
    assert r.status == "waiting"
    t.continue_generation()
    yield from t.run_until_finished(r)


# A server that starts looks for the folders of its LoRAs.
GONE = CONFIG.model_copy(update={"lora": "x=embedded-lora:1,gone=/nowhere"})


@scripted(GONE, tiers=("sim",))
def test_a_reading_that_fails_ends_those_that_wait_for_it(t):
    first = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    two = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=2, lora="gone") for seed in range(2)]
    base = t.start_req(prompt_len=20, max_new_tokens=2)
    yield from t.run_until_all_finished([*two, base])
    assert [r.finish_reason for r in (*two, base)] == ["unavailable", "unavailable", "length"]
    yield from _finds(t, first)


@scripted(FOUR_STAGES)
def test_a_reading_that_fails_on_four_stages_changes_nothing(t):
    first = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    load = t.load_lora("gone", "/nowhere")
    yield from t.run_until(lambda: load.done)
    assert load.status == 400
    yield from _finds(t, first)


def _finds(t, first):
    assert _held(t) == ["x"], "the LoRA that was to make room is lost"
    again = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    yield from t.run_until_finished(again)
    assert (again.cached_tokens, again.output_ids) == (32, first.output_ids)


@scripted(FOUR_STAGES)
def test_a_stalled_stage_reads_nothing(t):
    t.stall_stage(2)
    load = t.load_lora("z", "embedded-lora:1")
    for _ in range(3):
        yield
    assert not load.done
    t.resume_stage(2)
    yield from t.run_until(lambda: load.done)
    assert load.status == 200, load.text
