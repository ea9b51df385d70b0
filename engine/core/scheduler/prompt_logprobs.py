"""Prompt logprobs: the positions that a segment requests, and the replies with their values.

The values of a chunk come with its result and are sent once, in that step. A request notes how far they were sent, so
that a prompt that is recomputed requests only the rest. Values are never kept here.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import IntegrityError
from engine.core.messages import Completion, Generate, TokenOutput
from engine.core.plan import DECODE, Microbatch, SegmentShare
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.replies import part_of
from engine.core.scheduler.request import NO_POSITION, Request


class PromptLogprobs(Feature):
    """Keeps ``Request.logits_from``, the first position whose logprob has not been sent."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def enter(self, request: Request, message: Generate) -> None:
        if message.prompt_logprobs_from >= 0:
            request.logits_from = message.prompt_logprobs_from

    def fill_prompt(self, request: Request, start: int, end: int, share: SegmentShare) -> None:
        """Request the logprobs that are due from a segment of a prompt.

        The logits of a position predict the token after it. So the last position of a prompt has no prompt logprob, and
        the last position of any other chunk needs the first token of the next chunk.
        """
        if request.logits_from == NO_POSITION:
            return
        first = max(start, request.logits_from)
        if first < min(end, request.prompt_tokens - 1):
            share["logprobs_from"] = first
            share["next_id"] = request.ids[end] if end < request.prompt_tokens else -1

    def take_prompts(self, launched: Launched, completion: Completion) -> None:
        """Reply with the logprobs that came with a result."""
        for part in logprob_parts(launched.microbatch, launched.requests, completion):
            self._core.say(part)


def logprob_parts(microbatch: Microbatch, requests: Sequence[Request], completion: Completion) -> list[TokenOutput]:
    """Return a reply for each chunk of a result, except for requests that have ended.

    Raises IntegrityError for a result that does not fit its plan.
    """
    if microbatch.mode is DECODE:
        return []
    both = zip(microbatch.segments, requests, strict=True)
    asked = [(segment, request) for segment, request in both if segment.logprobs_from >= 0]
    values = completion.prompt_logprobs
    if not asked and not values:
        return []
    counts, due = [len(part) for part in values], [len(segment.targets) for segment, _ in asked]
    if counts != due:
        raise IntegrityError(
            f"microbatch {microbatch.id} came back with prompt logprobs of {counts} tokens, but {due} were requested"
        )
    replies: list[TokenOutput] = []
    for (segment, request), part in zip(asked, values, strict=True):
        if not request.is_finished:
            request.logits_from = segment.logprobs_from + len(part)
            replies.append(part_of(request, part))
    return replies
