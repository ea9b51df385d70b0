"""What a request says when nothing disturbs it: the tokens that every schedule must give it.

The simulated pipeline computes tokens from the KV that a request reads; alone on a fresh engine it reads its own.
"""

from __future__ import annotations

import functools

from engine.config import EngineConfig
from engine.limits import EMBEDDED_FACTS, Limits
from engine.messages import CallAnswer, FinishReason, Generate, SamplingParams, TokenOutput, UpdateWeights
from engine.scheduler import Scheduler
from scripted.checks.clients import Life, Violation
from scripted.simulated_pipeline import SimulatedPipeline

__all__ = ["check_tokens", "tokens_alone"]

_BUDGET_STEPS = 20_000


def check_tokens(life: Life) -> None:
    """What a request said, to its end or until it was stopped, is what it says alone. Raises Violation with both.

    One that lived through an update of the weights has no counterpart.
    """
    message, said = life.message, tuple(life.tokens)
    if len(life.weights) != 1:
        return
    (weights,) = life.weights
    alone = tokens_alone(message.prompt_ids, message.sampling.max_new_tokens, weights)
    if said != alone[: len(said)]:
        raise Violation(f"{message.rid} said {list(said)}, but alone it says {list(alone)}; it ended with {life.end}")


@functools.lru_cache(maxsize=4096)
def tokens_alone(prompt_ids: tuple[int, ...], max_new_tokens: int, weights: str | None = None) -> tuple[int, ...]:
    """The output of a greedy request, alone, on one stage, with room for everything and these weights."""
    limits = _roomy()
    scheduler, pipeline = Scheduler(limits), SimulatedPipeline(limits)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    update = UpdateWeights(call_id="weights", model_path=weights)
    result = scheduler.step((update, Generate(rid="alone", prompt_ids=prompt_ids, sampling=sampling)), 0.0)
    tokens: list[int] = []
    for _ in range(_BUDGET_STEPS):
        if result.microbatch is not None:
            pipeline.launch(result.microbatch)
        event = pipeline.next_completion(0)
        result = scheduler.step(() if event is None else (event,), 0.0)
        for reply in result.replies:
            if isinstance(reply, CallAnswer):
                assert reply.ok, reply.message
                continue
            assert isinstance(reply, TokenOutput)
            tokens += reply.token_ids
            if reply.finish_reason is not None:
                assert reply.finish_reason is FinishReason.LENGTH, f"a request alone ended with {reply.finish_reason}"
                return tuple(tokens)
    raise Violation(f"a request alone did not end within {_BUDGET_STEPS} steps")


@functools.cache
def _roomy() -> Limits:
    return Limits.of(EngineConfig(), EMBEDDED_FACTS)
