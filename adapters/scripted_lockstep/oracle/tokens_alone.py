"""The output of a request that runs alone: the tokens and prompt logprobs that every schedule must give it.

Batching, chunking, prefix hits, retraction and pipeline depth must not matter. The search computes it on fresh
simulated stages; a script uses its own flushed, idle engine, which has the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.config import EMBEDDED_MODEL, EMBEDDED_WINDOW_MODEL, EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, FinishReason, Generate, PromptLogprob, SamplingParams
from engine.core.plan import (
    PREFILL,
    Forward,
    GrammarOrder,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    Microbatch,
    Segment,
    WeightUpdate,
)
from scripted.core.account import overrun
from scripted.core.violation import Violation
from scripted_lockstep.simulated.model import alphabet_of
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from scripted_lockstep.specification.request import SpecifiedRequest

NATURAL_ENDS: Final = frozenset({FinishReason.LENGTH, FinishReason.STOP})
BUDGET_STEPS: Final = 20_000

# The number of the only LoRA and of the only grammar.
_VERSION: Final = 1
# The tolerance: chunks of other lengths are other matrix products, whose last bits differ in a real model.
_LOGPROB_TOLERANCE: Final = 1e-3

# The tokens of a request, and the logprobs of its prompt.
SaidAlone = tuple[tuple[int, ...], tuple[PromptLogprob, ...]]


def check_tokens(request: SpecifiedRequest, weights: Sequence[str | None], limits: Limits) -> None:
    """Compare a request's output, to its end or to where it was stopped, with its output alone.

    ``weights`` are by version, ``limits`` are its engine's. A request that spans a weight update has no counterpart.
    Raises Violation with both outputs.
    """
    message, said = request.message, tuple(request.ids[len(request.message.prompt_ids) :])
    if len(request.versions) != 1 or not is_repeatable(message.sampling):
        return
    roomy = _roomy(limits) if request.lora is None else _with_lora(limits, request.lora.path)
    asked = message.prompt_logprobs_from, message.prompt_top_logprobs_num
    engine = weights[request.versions[0]], roomy, alphabet_of(limits)
    alone, logprobs = said_alone(message.prompt_ids, message.sampling, *asked, *engine, most=len(said))
    if said != alone[: len(said)]:
        alone, _ = said_alone(message.prompt_ids, message.sampling, *asked, *engine)
        limit = overrun(said, message.sampling.max_new_tokens)
        raise Violation(
            f"{request.rid} said {list(said)}, but alone it says {list(alone)}{limit}; it ended: {request.end}"
        )
    served = request.prompt_logprobs
    if served != logprobs[: len(served)]:
        raise Violation(other_logprobs(request.rid, served, logprobs))


@functools.lru_cache(maxsize=4096)
def said_alone(
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    prompt_logprobs_from: int,
    prompt_top_logprobs_num: int,
    weights: str | None,
    limits: Limits,
    alphabet: int,
    *,
    most: int | None = None,
) -> SaidAlone:
    """Return the output of a request alone, or its first ``most`` tokens, on simulated stages with these weights.

    Stages that have a LoRA compute the request with it. No scheduler is involved, because its defect would affect this
    output too.
    """
    message = Generate(
        rid="alone",
        prompt_ids=prompt_ids,
        sampling=sampling,
        prompt_logprobs_from=prompt_logprobs_from,
        prompt_top_logprobs_num=prompt_top_logprobs_num,
    )
    request, pipeline = SpecifiedRequest(message, 1, limits), SimulatedPipeline(limits, alphabet=alphabet)
    if weights is not None:
        # The simulated tokens of a seed are the same with and without window layers.
        _computed(pipeline, WeightUpdate(0, weights.replace(EMBEDDED_WINDOW_MODEL, EMBEDDED_MODEL)))
    for name, path in limits.loras:
        pipeline.order_lora(LoraOrder(_VERSION, name, path))
        pipeline.answers()
        _computed(pipeline, LoraUpdate(0, LoraChange(name, _VERSION, path)))
    if sampling.grammar is not None:
        request.grammar_id = _VERSION
        pipeline.order_grammar(GrammarOrder(_VERSION, sampling.grammar))
        pipeline.answers()
    end = request.limit_tokens if most is None else len(prompt_ids) + most
    return _run_alone(request, end, limits.page_size, pipeline, lora=_VERSION if limits.loras else 0)


def _run_alone(
    request: SpecifiedRequest, end: int, page_size: int, pipeline: SimulatedPipeline, *, lora: int
) -> SaidAlone:
    """Compute the prompt in one microbatch, then one token in each, until the request ends or reaches ``end``."""
    ids, start, known_pages = request.ids, 0, 0
    logprobs: tuple[PromptLogprob, ...] = ()
    while True:
        pages = -(-len(ids) // page_size)
        logprobs_from = request.due_logprobs(0, len(ids))[0] if start == 0 else -1
        segment = Segment(
            request.rid,
            row=0,
            start=start,
            token_ids=tuple(ids[start:]),
            page_start=known_pages,
            pages=tuple(range(known_pages, pages)),
            emits=len(ids) < request.limit_tokens,
            sampling=request.sampling() if start == 0 else None,
            logprobs_from=logprobs_from,
            lora=lora,
        )
        result = _computed(pipeline, Forward(start, PREFILL, (segment,)))
        start, known_pages = len(ids), pages
        for part in result.prompt_logprobs:
            logprobs += part
        # A request at a dead end of its grammar ends without another token.
        ids += () if result.errors else result.token_ids
        if start == len(ids) or len(ids) >= end or request.why_ended(ids[-1]) is not None:
            return tuple(ids[len(request.message.prompt_ids) :]), logprobs


def _computed(pipeline: SimulatedPipeline, microbatch: Microbatch) -> Completion:
    pipeline.launch(microbatch)
    result = pipeline.next_completion(0)
    assert isinstance(result, Completion), f"simulated stages answer {microbatch} with {result}"
    assert result.error is None, result.error
    return result


def are_alike(served: Sequence[PromptLogprob], alone: Sequence[PromptLogprob]) -> bool:
    """Return whether both have the same values, up to rounding."""
    if len(served) != len(alone):
        return False
    return all(abs(one.logprob - other.logprob) < _LOGPROB_TOLERANCE for one, other in zip(served, alone, strict=True))


def other_logprobs(rid: str, served: Sequence[PromptLogprob], alone: Sequence[PromptLogprob]) -> str:
    """Name the first prompt logprob that differs from the one alone."""
    places = range(min(len(served), len(alone)))
    first = next(
        (place for place in places if not are_alike(served[place : place + 1], alone[place : place + 1])), None
    )
    if first is None:
        return f"{rid} was told {len(served)} prompt logprobs, but alone it is told {len(alone)}"
    return (
        f"{rid} was told the prompt logprob {served[first].logprob} in place {first} of those that it asked for, but "
        f"alone it is told {alone[first].logprob}"
    )


def is_repeatable(sampling: SamplingParams) -> bool:
    """Return whether it is greedy or has its own seed; any other seed depends on the number of earlier requests."""
    return sampling.temperature == 0 or sampling.seed is not None


@functools.lru_cache(maxsize=1024)
def _with_lora(limits: Limits, path: str) -> Limits:
    return msgspec.structs.replace(_roomy(limits), max_loras=1, loras=(("alone", path),))


@functools.lru_cache(maxsize=1024)
def _roomy(limits: Limits) -> Limits:
    """Return the limits of one stage of the same model, with room for a whole context and without speculation."""
    roomy = Limits.of(EngineConfig(), EMBEDDED_FACTS)
    return msgspec.structs.replace(
        roomy,
        total_pages=max(roomy.total_pages, roomy.pages_for(limits.context_length)),
        context_length=max(roomy.context_length, limits.context_length),
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        seed=limits.seed,
    )
