"""Cache salts: a prefix is shared only with requests of the same salt, in the pool, on the host and in flight.

Goal: a client learns nothing of another's prompts from the time of its own. Method: equal prompts of two salts and of
none, one after the other and together. Origin: cache salting as in vLLM. Mutants: a-salt-is-no-part-of-the-key,
the-second-tier-knows-no-salt, waits-for-a-prefix-of-another-salt.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
WINDOW = EngineConfig(model="embedded-window", chunked_prefill_size=64)
HOST = EngineConfig(chunked_prefill_size=64, max_total_tokens=512, host_kv_tokens=512, pp_async_depth=1)
GUESSING = EngineConfig(
    chunked_prefill_size=64, speculative_algorithm="draft_model", speculative_draft_model="embedded"
)
LORAS = EngineConfig(chunked_prefill_size=64, max_loras=2)
GUESSED = "a guess held"
TWO_STAGES = EngineConfig(pp_size=2, chunked_prefill_size=2048)
LONG = 1200
SALTS = (None, "u", "v")
PROMPT_TOKENS = 81
HIT_TOKENS = 80


def _each_salt_twice(t, **more):
    said, seen = [], set()
    for salt in (*SALTS, *SALTS):
        r = t.start_req(prompt_len=PROMPT_TOKENS, max_new_tokens=4, cache_salt=salt, **more)
        yield from t.run_until_finished(r)
        assert salt in seen or not r.cached_tokens, f"{salt}: it hit a prefix of another salt"
        assert salt not in seen or r.cached_tokens == HIT_TOKENS, f"{salt}: it did not hit its own prefix"
        seen.add(salt)
        said.append(r.output_ids)
        yield from t.run_until_idle()
    assert said == said[:1] * len(said), "a salt changes no output"


@scripted(ONE_STAGE)
def test_equal_prompts_of_two_salts_share_nothing(t):
    yield from _each_salt_twice(t)


@scripted(FOUR_STAGES)
def test_equal_prompts_of_two_salts_share_nothing_on_four_stages(t):
    yield from _each_salt_twice(t)


@scripted(WINDOW)
def test_equal_prompts_of_two_salts_share_nothing_with_window_layers(t):
    yield from _each_salt_twice(t)


@scripted(GUESSING, must_reach=[GUESSED])
def test_equal_prompts_of_two_salts_share_nothing_where_a_model_guesses(t):
    yield from _each_salt_twice(t)
    t.sometimes(GUESSED, t.engine_stats().accepted_tokens > 0)


@scripted(LORAS, tiers=("sim",))
def test_a_salt_and_a_lora_share_with_neither_alone(t):
    call = t.load_lora("x", "embedded-lora:1")
    yield from t.run_until(lambda: call.done)
    yield from _each_salt_twice(t)
    yield from _each_salt_twice(t, lora="x")


@scripted(HOST)
def test_a_salt_holds_on_the_host_too(t):
    for salt, cached in (("u", 0), ("v", 0), (None, 0), ("u", HIT_TOKENS)):
        r = t.start_req(prompt_len=PROMPT_TOKENS, max_new_tokens=4, cache_salt=salt)
        yield from t.run_until_finished(r)
        assert r.cached_tokens == cached, f"{salt}: it hit a prefix of another salt, or not its own"
        yield from t.run_until_idle()
        t.evict()
        # The next microbatch carries evicted pages to the host.
        carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=2)
        yield from t.run_until_finished(carrier)
        yield from t.run_until_idle()
    assert t.engine_stats().host_hit_tokens >= HIT_TOKENS


@scripted(TWO_STAGES)
def test_a_request_waits_for_no_prompt_of_another_salt(t):
    requests = [t.start_req(prompt_len=LONG, max_new_tokens=2, cache_salt=salt) for salt in ("u", "v", "u")]
    yield
    yield
    in_flight = [rid for batch in t.state.in_flight for rid in batch.rids]
    assert requests[1].rid in in_flight, "it waited for a prompt of another salt"
    assert requests[2].rid not in in_flight
    yield from t.run_until_all_finished(requests)
    assert [r.cached_tokens > 0 for r in requests] == [False, False, True]
