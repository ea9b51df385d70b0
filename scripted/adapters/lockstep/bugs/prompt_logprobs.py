"""Mutants of prompt logprobs and of requests that compute a prompt only."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["PROMPT_LOGPROBS"]


PROMPT_LOGPROBS: Final = (
    Mutant(
        name="prompt-logprobs-skip-the-cached",
        origin="G29: vLLM issues 3251 and 8268",
        bug="a request that wants its prompt's logprobs hits the cache; positions that are cached have no logits",
        signature="== [0, 48, 80]",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_a_cached_prefix",
        target="engine.scheduler.request:Request.hit_limit_tokens",
        cut="self.logprobs_due if self.logprobs_due < self.prompt_tokens - 1 else ",
    ),
    Mutant(
        name="prompt-logprobs-of-another",
        origin="G29: SGLang issue 36938",
        bug="a request that has ended takes no values from a result; the next one is told values that are not its own",
        signature="but alone it is told",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_an_abort_beside_another_prompt",
        target="engine.scheduler.prompt_logprobs:parts_told",
        cut="for (segment, request), part in zip(asked, values, strict=True):",
        becomes=(
            "rest = [one for part in values for one in part]\n"
            "    for segment, request in asked:\n"
            "        if request.is_finished:\n"
            "            continue\n"
            "        part, rest = tuple(rest[: len(segment.targets)]), rest[len(segment.targets) :]"
        ),
    ),
    Mutant(
        name="prompt-logprobs-lost-with-the-batch",
        origin="G29: vLLM pull request 41411",
        bug="the prompt logprobs of a chunk are lost when its request is sent back before they are here",
        signature="a part of the prompt is lost",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_a_retraction_in_the_middle_of_the_prompt",
        target="engine.scheduler.prompt_logprobs:parts_told",
        cut="told.append(part_of(request, part))",
        becomes='told += [part_of(request, part)] if request.place != "retracting" else []',
    ),
    Mutant(
        name="prompt-logprobs-end-with-the-chunk",
        origin="G29: vLLM pull requests 4055 and 4139",
        bug="the last position of a chunk gives no logprob, because the token after it is in the next chunk",
        signature="logprobs for 93 tokens of the prompt",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_every_token_of_a_split_prompt",
        target="engine.scheduler.prompt_logprobs:next_asked",
        cut="request.ids[end] if end < request.prompt_tokens else -1",
        becomes="-1",
    ),
    Mutant(
        name="prefill-only-says-a-token",
        origin="G30: SGLang issue 4892, transformers pull request 28579",
        bug="a request of no new token says one all the same, because a prefill always samples",
        signature="== ('length', [])",
        test=f"{GALLERY_TESTS}/test_g30_prefill_only.py::test_nothing_is_said",
        target="engine.scheduler.planner:Planner._add_chunk",
        cut="emits = last and end < request.limit_tokens",
        becomes="emits = last",
    ),
    Mutant(
        name="failed-prefill-is-cached",
        origin="B04: only KV whose result came is shared",
        bug="a request of no new token leaves its prompt in the cache when its last part fails, too",
        signature="== ('error', 0)",
        test=f"{GALLERY_TESTS}/test_g30_prefill_only.py::test_a_failed_one_leaves_nothing",
        target="engine.scheduler.scheduler:Scheduler._on_failed_segment",
        cut="if request.is_finished:",
        becomes=(
            "if request.is_prefilled and request.lease is not None and not request.in_flight:\n"
            "        self.memory.publish(request.lease, request.ids, counts=True)\n"
            "    if request.is_finished:"
        ),
    ),
)
