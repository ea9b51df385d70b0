"""More LoRAs than places: idle LoRAs are replaced, LoRAs in use never are, and a request that waits for a place blocks
nobody and does not wait forever.

Goal: with max_loras=1 two LoRAs take turns; the LoRA of a split prompt stays; a request that lacks its LoRA is
passed over, by 16 at most; a load that fails changes nothing. Method: requests of both, at one time. Origin: SGLang
issue 23141, pull requests 14795, 15129, 25078 and 25567, vLLM pull request 15422; B10. Mutants:
eviction-ignores-a-split-prompt, lora-waits-for-ever, lora-blocks-the-queue, failed-change-of-loras-is-booked.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=14, suite="base-cpu")

CONFIG = EngineConfig(lora="x=embedded-lora:1,y=embedded-lora:2", max_loras=1, chunked_prefill_size=32)
FOUR_STAGES = CONFIG.model_copy(update={"pp_size": 4, "pp_async_depth": 1})
SPLIT = "a prompt of one LoRA is split, and a request of another waits"
WAITS = "a request waits for the place of a LoRA that is in use"
OVERTAKEN_LIMIT = 16


def _held(t):
    """Return the versions that the stages hold, by name, according to the plans."""
    return {name: lora.version for name, lora in t.scheduler.features.loras.known.items() if lora.version}


def _in_turn(t):
    first = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    second = t.start_req(prompt_len=40, max_new_tokens=4, lora="y")
    third = t.start_req(prompt_len=40, max_new_tokens=4)
    yield from t.run_until_all_finished([first, second, third])
    assert len({r.output_ids for r in (first, second, third)}) == 3
    assert list(_held(t)) == ["y"]
    again = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    yield from t.run_until_finished(again)
    assert again.output_ids == first.output_ids
    assert again.cached_tokens == 0, "KV of a LoRA that made room was found again"
    stats = t.engine_stats()
    assert (stats.loras_resident, stats.lora_loads, stats.lora_evictions) == (1, 3, 2)


@scripted(CONFIG)
def test_two_loras_take_turns_in_one_place(t):
    yield from _in_turn(t)


@scripted(FOUR_STAGES)
def test_two_loras_take_turns_on_four_stages(t):
    yield from _in_turn(t)


@scripted(CONFIG, must_reach=[SPLIT])
def test_a_split_prompt_keeps_its_lora(t):
    r = t.start_req(prompt_len=150, max_new_tokens=2, lora="x")
    yield from t.advance_to_nth_chunk(r, 1)
    other = t.start_req(prompt_len=20, max_new_tokens=2, lora="y")
    while r.is_chunking:
        t.sometimes(SPLIT, other.status == "waiting")
        assert "x" in _held(t), "the LoRA of a split prompt made room"
        yield
    yield from t.run_until_all_finished([r, other])


@scripted(CONFIG, must_reach=[WAITS])
def test_a_request_without_lora_holds_no_other_up(t):
    long = t.start_req(prompt_len=20, max_new_tokens=30, ignore_eos=True, lora="x")
    yield from t.advance_to_decode_step(long, 2)
    waits = t.start_req(prompt_len=20, max_new_tokens=2, lora="y")
    base = t.start_req(prompt_len=20, max_new_tokens=2)
    same = t.start_req(prompt_len=20, prompt_seed=3, max_new_tokens=2, lora="x")
    for _ in range(10):
        t.sometimes(WAITS, waits.status == "waiting" and not long.finished)
        yield
    assert base.finished, "it held up a request that needs no LoRA"
    assert same.finished, "it held up a request whose LoRA is there"
    assert waits.status == "waiting"
    yield from t.run_until_all_finished([long, waits])


@scripted(CONFIG, must_reach=[WAITS])
def test_passing_over_a_request_without_lora_has_a_bound(t):
    rs = [t.start_req(prompt_len=5, max_new_tokens=4, ignore_eos=True, lora="x")]
    yield from t.advance_to_decode_step(rs[0], 1)
    waits = t.start_req(prompt_len=5, prompt_seed=1, max_new_tokens=1, lora="y")
    for number in range(60):
        if waits.finished:
            break
        t.sometimes(WAITS, waits.status == "waiting")
        rs.append(t.start_req(prompt_len=5, prompt_seed=2 + number, max_new_tokens=4, ignore_eos=True, lora="x"))
        yield
    passed = [r for r in rs[1:] if r.status != "waiting"]
    assert waits.finished, f"it starved: {len(passed)} got past it"
    yield from t.run_until_all_finished(rs)


@scripted(CONFIG)
def test_a_load_that_fails_changes_nothing(t):
    first = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    held = _held(t)
    t.fail_next_step(0)
    second = t.start_req(prompt_len=40, max_new_tokens=4, lora="y")
    yield from t.run_until_finished(second)
    assert second.finish_reason == "unavailable"
    yield from t.run_until(lambda: second.client.closed)
    assert second.client.status == 503
    assert _held(t) == held, "the LoRA that was to make room is lost"
    again = t.start_req(prompt_len=40, max_new_tokens=4, lora="x")
    better = t.start_req(prompt_len=40, max_new_tokens=4, lora="y")
    yield from t.run_until_all_finished([again, better])
    assert again.cached_tokens == 32
    assert better.finish_reason == "length"


@scripted(EngineConfig(max_loras=1, chunked_prefill_size=32))
def test_a_call_beside_a_full_place_reads_and_checks(t):
    loads = [t.load_lora("x", "embedded-lora:1")]
    yield from t.run_until(lambda: loads[0].done)
    long = t.start_req(prompt_len=20, max_new_tokens=12, ignore_eos=True, lora="x")
    yield from t.advance_to_decode_step(long, 2)
    loads += [t.load_lora("y", "embedded-lora:2"), t.load_lora("x", "embedded-lora:3")]
    yield from t.run_until(lambda: all(load.done for load in loads))
    assert [load.status for load in loads] == [200, 200, 400]
    assert "has already been loaded" in loads[2].text
    assert not long.finished
    assert list(_held(t)) == ["x"]
    yield from t.run_until_finished(long)
    yield from t.run_until_idle()
    nowhere = t.load_lora("z", "/nowhere")
    yield from t.run_until(lambda: nowhere.done)
    assert nowhere.status == 400
    assert "/nowhere" in nowhere.text
    assert list(_held(t)) == ["x"], "the LoRA that was to make room is lost"
    other = t.start_req(prompt_len=20, max_new_tokens=2, lora="y")
    yield from t.run_until_finished(other)
    assert list(_held(t)) == ["y"]
