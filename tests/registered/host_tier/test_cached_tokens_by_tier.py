"""A client sees in which tier its prompt was hit, and a second admission changes neither count.

Goal: of a prefix whose beginning is in the KV cache and whose end is on the host, each tier counts its own tokens, on
one stage and on four; a retraction in the middle of the load adds nothing. Method: evict the end of a prompt or all of
it, carry it to the host, ask again; send the request back while the load is in flight. Origin: SGLang pull requests
17648, 26590 and 11900; C02. Mutant: host-hits-count-as-device-hits.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=5, suite="base-cpu")

SIZES = {"chunked_prefill_size": 64, "max_total_tokens": 512, "host_kv_tokens": 512, "kv_sanitizer": True}
ONE_STAGE = EngineConfig(**SIZES, pp_async_depth=1)
FOUR_STAGES = EngineConfig(**SIZES, pp_size=4, pp_async_depth=2)
BOTH = "the prompt is in both tiers"
LOADING = "the load is in flight"


def _on_the_host(t, *, pages):
    """The last pages of a prompt of five were evicted and copied to the host."""
    first = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(first)
    yield from t.run_until_idle()
    t.evict(pages=pages)
    carrier = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(carrier)
    yield from t.run_until_idle()
    return first


def _in_both_tiers(t):
    first = yield from _on_the_host(t, pages=3)
    assert (first.cached_tokens_device, first.cached_tokens_host) == (0, 0)
    t.sometimes(BOTH, t.host_tokens(first.prompt_ids) == 32)
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 64
    assert (again.cached_tokens_device, again.cached_tokens_host) == (32, 32), "32 tokens were loaded from the host"
    last = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until_finished(last)
    assert (last.cached_tokens_device, last.cached_tokens_host) == (64, 0), "the tree had all of it again"


@scripted(ONE_STAGE, must_reach=[BOTH])
def test_a_prefix_in_both_tiers(t):
    yield from _in_both_tiers(t)


@scripted(FOUR_STAGES, must_reach=[BOTH])
def test_a_prefix_in_both_tiers_on_four_stages(t):
    yield from _in_both_tiers(t)


@scripted(ONE_STAGE, must_reach=[LOADING])
def test_a_retraction_changes_no_count(t):
    first = yield from _on_the_host(t, pages=5)
    t.hold_results()
    again = t.start_req(prompt_len=80, max_new_tokens=4)
    yield from t.run_until(lambda: t.state.in_flight)
    t.sometimes(LOADING, t.state.in_flight[0].loaded_pages == 4)
    t.pause_generation("retract")
    yield
    t.release_results()
    yield from t.run_until(lambda: again.status == "waiting")
    t.evict()
    t.continue_generation()
    yield from t.run_until_finished(again)
    assert again.output_ids == first.output_ids
    assert (again.cached_tokens_device, again.cached_tokens_host) == (0, 64), "it was counted again"
