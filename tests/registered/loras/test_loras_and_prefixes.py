"""LoRAs and the prefix cache: KV computed by one LoRA is never a prefix for another.

Goal: equal prompts of two LoRAs and of the model share nothing, a batch of all three gives each one's output alone, and
a name that is loaded again with other weights starts without KV. Method: one prompt, several LoRAs, at one time and one
after the other. Origin: vLLM issues 3264, 30931, 42125; C11. Mutants: prefix-shared-between-loras,
lora-known-by-its-name.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=10, suite="base-cpu")

# Without the sanitizer, which would report a wrongly shared prefix before the script does.
ONE_STAGE = EngineConfig(chunked_prefill_size=64, max_loras=2)
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64, max_loras=2, kv_sanitizer=True)
# A microbatch has room for a prompt of each LoRA; the others wait for these, and would never meet in a batch otherwise.
ROOMY = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=256, max_loras=2, kv_sanitizer=True)
GUESSING = EngineConfig(
    chunked_prefill_size=64, max_loras=2, speculative_algorithm="draft_model", speculative_draft_model="embedded"
)
PROMPT = list(range(32, 32 + 80))
TOGETHER = "three requests of one batch decode, each with another LoRA or none"


def _load(t, **paths):
    for name, path in paths.items():
        call = t.load_lora(name, path)
        yield from t.run_until(lambda call=call: call.done)
        assert (call.status, call.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


def _same_prompt_thrice(t):
    yield from _load(t, x="embedded-lora:1", y="embedded-lora:2")
    said = {}
    for lora in (None, "x", "y", "x"):
        r = t.start_req(prompt_ids=PROMPT, max_new_tokens=6, lora=lora)
        yield from t.run_until_finished(r)
        known = lora in said
        assert known or not r.cached_tokens, f"{lora}: it hit KV that the model itself had computed"
        assert not known or r.cached_tokens == 64
        assert said.setdefault(lora, r.output_ids) == r.output_ids
        yield from t.run_until_idle()
    assert len(set(said.values())) == 3, "a LoRA changes nothing"


@scripted(ONE_STAGE)
def test_equal_prompts_of_two_loras_share_nothing(t):
    yield from _same_prompt_thrice(t)


@scripted(FOUR_STAGES)
def test_equal_prompts_of_two_loras_share_nothing_on_four_stages(t):
    yield from _same_prompt_thrice(t)


GUESSED = "guesses for a request of a LoRA are in flight"


@scripted(GUESSING, must_reach=[GUESSED])
def test_a_model_that_guesses_knows_no_lora(t):
    """The output is the LoRA's all the same."""
    yield from _load(t, x="embedded-lora:1")
    rs = [t.start_req(prompt_ids=PROMPT, max_new_tokens=9, lora=lora) for lora in (None, "x")]
    while not all(r.finished for r in rs):
        last = t.history[-1].microbatch if t.history else None
        t.sometimes(GUESSED, last is not None and any(one.drafts and one.lora for one in last.segments))
        yield
    assert len({r.output_ids for r in rs}) == 2


@scripted(ONE_STAGE)
def test_the_logprobs_of_a_prompt_are_those_of_its_lora(t):
    yield from _load(t, x="embedded-lora:1", y="embedded-lora:2")
    told = {}
    for lora in (None, "x", "y"):
        r = t.start_req(
            prompt_ids=PROMPT, max_new_tokens=0, return_logprob=True, logprob_start_len=8, stream=False, lora=lora
        )
        yield from t.run_until_finished(r)
        told[lora] = tuple(one.logprob for one in r.prompt_logprobs)
    assert [len(logprobs) for logprobs in told.values()] == [71, 71, 71]
    assert len(set(told.values())) == 3, "a LoRA changes nothing"


@scripted(ONE_STAGE, must_reach=[TOGETHER])
def test_a_batch_of_several_loras_says_what_each_says_alone(t):
    yield from _together(t, each=1)


@scripted(ROOMY, must_reach=[TOGETHER])
def test_a_batch_of_several_loras_says_what_each_says_alone_on_four_stages(t):
    yield from _together(t, each=4)


def _together(t, *, each):
    yield from _load(t, x="embedded-lora:1", y="embedded-lora:2")
    rs = [t.start_req(prompt_ids=PROMPT, max_new_tokens=9, lora=lora) for lora in (None, "x", "y") * each]
    while not all(r.finished for r in rs):
        last = t.history[-1].microbatch if t.history else None
        loras = {segment.lora for segment in last.segments} if last is not None else set()
        t.sometimes(TOGETHER, len(loras) == 3)
        yield
    assert all(r.cached_tokens == 0 for r in rs[:3]), "it hit KV that the model itself had computed"
    assert len({r.output_ids for r in rs}) == 3


@scripted(ONE_STAGE)
def test_a_name_with_other_weights_begins_anew(t):
    yield from _load(t, x="embedded-lora:1")
    before = t.start_req(prompt_ids=PROMPT, max_new_tokens=6, lora="x")
    yield from t.run_until_finished(before)
    yield from t.run_until_idle()
    unload = t.unload_lora("x")
    yield from t.run_until(lambda: unload.done)
    assert (unload.status, unload.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    yield from _load(t, x="embedded-lora:2")
    after = t.start_req(prompt_ids=PROMPT, max_new_tokens=6, lora="x")
    yield from t.run_until_finished(after)
    assert after.cached_tokens == 0, "it hit KV of the weights that were unloaded"
    assert after.output_ids != before.output_ids


@scripted(ONE_STAGE)
def test_loras_stay_when_the_weights_are_updated(t):
    yield from _load(t, x="embedded-lora:1")
    before = t.start_req(prompt_ids=PROMPT, max_new_tokens=6, lora="x")
    yield from t.run_until_finished(before)
    yield from t.run_until_idle()
    update = t.update_weights("embedded:7")
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, update.text
    rs = []
    for lora in (None, "x"):
        rs.append(t.start_req(prompt_ids=PROMPT, max_new_tokens=6, lora=lora))
        yield from t.run_until_finished(rs[-1])
    assert [r.cached_tokens for r in rs] == [0, 0], "it hit KV that the model itself had computed"
    assert len({before.output_ids, *[r.output_ids for r in rs]}) == 3
    assert t.engine_stats().loras_resident == 1
