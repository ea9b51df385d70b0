"""Images on vLLM's scheduler: its encoder's cache, shared by requests, and caches that a pause empties.

Goal: the workers have every image that a plan reads, and no request waits for the encoder forever. Method: schedules;
the defect of the released version also with vLLM's classes alone. Origin: vLLM pull requests 31857, 23551 and 53723.
Mutant: images-of-who-cannot-start; the released version has the defect.
"""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.versions import installed_version

from scripted import scripted
from scripted.api import write_test
from scripted.core.errors import BadCall
from scripted.core.schedule import Schedule
from scripted.sdk.actions import SubmitRequest
from scripted.sdk.images import LARGEST_IMAGE
from scripted.search.execution import execute
from scripted.search.generated import space_of

register_cpu_ci(est_time=30, suite="vllm-cpu")

PAGE = (Path(__file__).parents[3] / "benchmarks/tables/defects.md").read_text(encoding="utf-8")
NEVER_ENCODED = (
    "adapter=vllm block_size=2 num_gpu_blocks=12 max_model_len=20 max_num_batched_tokens=8 "
    "long_prefill_token_threshold=4 policy=priority enable_prefix_caching=False encoder_cache_size=6; "
    "1 start a prompt=15 new=1 seed=1 images=5; 2 start b prompt=7 new=1 seed=2 priority=1"
)
TOO_MANY_LORAS = (
    "adapter=vllm pipeline_parallel_size=2 max_num_batched_tokens=8 max_loras=1; "
    "1 start a prompt=9 new=2 lora=1; 1 start b prompt=9 new=1 seed=1 lora=2"
)
CUT_BY_EAGLE = (
    "adapter=vllm max_num_batched_tokens=8 num_speculative_tokens=1 speculative_method=eagle encoder_cache_size=12 "
    "disable_chunked_mm_input=True; 1 start a prompt=12 new=1 seed=4 images=2"
)
KEPT_BY_OTHERS = "adapter=vllm kv_connector=sync; 1 start a prompt=4 new=1; 1 start b prompt=12 new=1; 1 fail-load"
GUESSED_IN_A_SESSION = (
    "adapter=vllm enable_prefix_caching=False num_speculative_tokens=2 mamba_cache_mode=none; "
    "1 start a prompt=1 new=3 session=1; 2 more a tokens=1"
)
KEPT_OUT = (
    "adapter=vllm mamba_cache_mode=align block_size=8 max_num_batched_tokens=8 num_gpu_blocks=16; "
    "1 start a prompt=4 new=24; 2 start b prompt=20 seed=1 new=2"
)


@pytest.mark.parametrize(
    "text",
    [
        # Of a pause that empties the caches what runs begins again; so does what an aborting one leaves.
        "default; 1 start a prompt=25 images=2; 2 pause mode=keep-clear; 4 continue",
        "async_scheduling=True; 1 start a prompt=9 images=1 new=6; 4 pause mode=keep-clear; 9 continue",
        "default; 1 start a prompt=9 images=1; 2 pause mode=abort-clear; 3 start b prompt=9 images=1; 5 continue",
        # One that lets what runs end is answered when it has.
        "default; 1 start a prompt=9 images=1 new=5; 2 pause mode=wait-clear; 3 start b prompt=9; 12 continue",
    ],
)
def test_a_pause_may_empty_the_caches(text: str) -> None:
    schedule = Schedule.parse(f"encoder_cache_size=8 {text.removeprefix('default')}", of="vllm")
    assert execute(schedule).failure is None


def test_prompts_may_be_shorter_than_the_image_beside_them() -> None:
    """An encoder-decoder's encoder has a longer input than its decoder, whose prompt begins all the same."""
    row = {"is_encoder_decoder": "other", "disable_chunked_mm_input": "other", "requests": "several"}
    drawn = [space_of("vllm").draw(row, random.Random(seed)) for seed in range(8)]
    begun = [one.action for schedule in drawn for one in schedule.placed]
    images = [one for one in begun if isinstance(one, SubmitRequest) and one.images]
    assert any(one.prompt < LARGEST_IMAGE and one.images == 1 and not (one.seed + one.tail) % 3 for one in images)
    assert [execute(schedule).failure for schedule in drawn] == [None] * 8


@scripted(adapter="vllm", encoder_cache_size=8)
def test_two_requests_share_an_image(t):
    """The text around it is another; what the encoder made is used again."""
    first = t.start_req(prompt_len=14, images=1, max_new_tokens=6)
    yield
    assert t.state.images_free == 5
    second = t.start_req(prompt_len=12, shared_len=3, tail_seed=3, images=1)
    yield
    assert first.prompt_ids[5:8] != second.prompt_ids[4:7]
    third = t.start_req(prompt_len=13, prompt_seed=3, images=1)
    yield
    assert t.state.images_free == 5
    with pytest.raises(BadCall, match="takes no lora"):
        t.start_req(prompt_len=4, lora=1)
    for request in (first, second, third):
        yield from t.run_until_finished(request)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (NEVER_ENCODED, "of its image at positions 12 to 14 the device has nothing"),
        (TOO_MANY_LORAS, "AssertionError"),
        (CUT_BY_EAGLE, "ends within its image at positions 0 to 5"),
        (KEPT_BY_OTHERS, "the block does not hold their KV"),
        (KEPT_OUT, "8 batches with room were launched without it"),
    ],
)
def test_a_defect_on_the_page_is_there(text: str, what: str) -> None:
    if text == TOO_MANY_LORAS and installed_version() != "0.32.0":
        pytest.skip("0.33.0 does not have it")
    assert text in " ".join(PAGE.split())
    failure = execute(Schedule.parse(text)).failure
    assert failure is not None
    assert what in str(failure)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (CUT_BY_EAGLE, "prompt=12", "prompt=16"),
        (CUT_BY_EAGLE, "=eagle", "=ngram"),
        (KEPT_BY_OTHERS, "a prompt=4 new=1", "a prompt=4 new=1 seed=1"),
        (GUESSED_IN_A_SESSION, "num_speculative_tokens=2", "num_speculative_tokens=0"),
    ],
)
def test_the_neighbour_of_a_defect_passes(text: str, old: str, new: str) -> None:
    assert execute(Schedule.parse(text)).failure is not None
    assert execute(Schedule.parse(text.replace(old, new))).failure is None


def test_an_image_may_wait_within_which_a_load_ends() -> None:
    """From the middle of an image nothing is computed until the encoder has room; 0.33 admits the next request."""
    text = "kv_connector=sync kv_offered_tokens=4 encoder_cache_size=8"
    text += "; 1 start a prompt=14 new=1 images=2; 2 start b prompt=18 new=1 images=2"
    assert execute(Schedule.parse(text, of="vllm")).failure is None


def test_what_was_never_encoded_is_written_with_vllms_classes_alone() -> None:
    """B15: the file is run where nothing of this project can be imported, and fails as the schedule does."""
    schedule = Schedule.parse(NEVER_ENCODED)
    written = write_test(schedule, standalone=True)
    assert written.text is not None, written.said
    assert re.search("^(from|import) (scripted|engine)", written.text, re.MULTILINE) is None
