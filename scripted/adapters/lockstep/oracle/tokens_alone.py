"""The output of a request that runs alone: the tokens, and its prompt's logprobs, that every schedule must give it.

Batching, chunking, prefix hits, retraction and pipeline depth must not matter. The search asks a fresh simulated
engine; a script asks its own engine, flushed and idle, because only that one has its weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final

import msgspec

from engine.config import EngineConfig
from engine.limits import EMBEDDED_FACTS, Limits
from engine.messages import (
    CallAnswer,
    Event,
    FinishReason,
    Generate,
    PromptLogprob,
    Reply,
    SamplingParams,
    TokenOutput,
    UpdateWeights,
)
from engine.scheduler import Scheduler
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.simulated.model import alphabet_of
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline
from scripted.core.violation import Violation
from scripted.rig.handle import RequestHandle
from scripted.rig.rig import Rig

__all__ = ["AloneRuns", "Compared", "check_tokens"]

_NATURAL_ENDS: Final = frozenset({FinishReason.LENGTH, FinishReason.STOP})
# A grammar that leads nowhere does so alone too.
_ENDS_ALONE: Final = (*_NATURAL_ENDS, FinishReason.INVALID)
_BUDGET_STEPS: Final = 20_000

# Chunks of other lengths are other matrix products, which differ in the last bits of a real model.
_LOGPROB_TOLERANCE: Final = 1e-3

# What a request says, and the logprobs of its prompt.
_Said = tuple[tuple[int, ...], tuple[PromptLogprob, ...]]
_Key = tuple[int, tuple[int, ...], SamplingParams, int, int, str | None]


class Compared(msgspec.Struct):
    """How many outputs were compared, and how many were not, by the reason."""

    outputs: int = 0
    skipped: dict[str, int] = msgspec.field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count one that was not compared."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def check_tokens(life: Life, weights: Sequence[str | None], limits: Limits) -> None:
    """What a request said, to its end or until it was stopped, is what it says alone. ``weights`` are by version.

    ``limits`` are those of the engine that it ran in. One that lived through an update of the weights has no
    counterpart. Raises Violation with both outputs.
    """
    message, said = life.message, life.tokens
    if len(life.versions) != 1 or not _is_repeatable(message.sampling):
        return
    roomy = _roomy(limits) if life.lora_path is None else _with_lora(limits, life.lora_path)
    asked = message.prompt_logprobs_from, message.prompt_top_logprobs_num
    engine = weights[life.versions[0]], roomy, alphabet_of(limits)
    alone, logprobs = said_alone(message.prompt_ids, message.sampling, *asked, *engine)
    if said != alone[: len(said)]:
        raise Violation(f"{life.rid} said {list(said)}, but alone it says {list(alone)}; it ended with {life.end}")
    told = life.prompt_logprobs
    if told != logprobs[: len(told)]:
        raise Violation(_other_logprobs(life.rid, told, logprobs))


@functools.lru_cache(maxsize=4096)
def said_alone(
    prompt_ids: tuple[int, ...],
    sampling: SamplingParams,
    prompt_logprobs_from: int,
    prompt_top_logprobs_num: int,
    weights: str | None,
    limits: Limits,
    alphabet: int,
) -> _Said:
    """What a request is told, alone, on a simulated engine of these limits with these weights.

    Where that engine has a LoRA, it computes the request.
    """
    scheduler, pipeline = Scheduler(limits), SimulatedPipeline(limits, alphabet=alphabet)
    update = UpdateWeights(call_id="weights", model_path=weights)
    lora = limits.loras[0][0] if limits.loras else None
    message = Generate(
        rid="alone",
        prompt_ids=prompt_ids,
        sampling=sampling,
        prompt_logprobs_from=prompt_logprobs_from,
        prompt_top_logprobs_num=prompt_top_logprobs_num,
        lora=lora,
    )
    result = scheduler.step((update, message), 0.0)
    tokens: list[int] = []
    logprobs: list[PromptLogprob] = []
    for _ in range(_BUDGET_STEPS):
        if result.microbatch is not None:
            pipeline.launch(result.microbatch)
        for order in result.grammars:
            pipeline.order_grammar(order)
        event = pipeline.next_completion(0)
        result = scheduler.step((*(() if event is None else (event,)), *pipeline.ready_grammars()), 0.0)
        for reply in result.replies:
            if isinstance(reply, CallAnswer):
                assert reply.ok, reply.message
                continue
            assert isinstance(reply, TokenOutput)
            tokens += reply.token_ids
            logprobs += reply.prompt_logprobs
            if reply.finish_reason is not None:
                assert reply.finish_reason in _ENDS_ALONE, f"a request alone ended with {reply.finish_reason}"
                return tuple(tokens), tuple(logprobs)
    raise Violation(f"a request alone did not end within {_BUDGET_STEPS} steps")


class AloneRuns:
    """Runs requests alone on a script's own engine, and remembers their outputs by the weights that computed them."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known: dict[_Key, _Said] = {}
        # Which weights the engine has: 0 for those that it was started with, a new number after each other update.
        self._weights = 0
        self._updates = itertools.count(1)
        self._asked: dict[str, str | None] = {}

    def note(self, events: Iterable[Event], replies: Iterable[Reply]) -> None:
        """Follow a step, which may have updated the weights."""
        for event in events:
            if isinstance(event, UpdateWeights):
                self._asked[event.call_id] = event.model_path
        for reply in replies if self._asked else ():
            if isinstance(reply, CallAnswer) and reply.call_id in self._asked:
                path = self._asked.pop(reply.call_id)
                if reply.ok:
                    self._weights = 0 if path is None else next(self._updates)

    def compare(
        self, handles: Iterable[RequestHandle], restore: Callable[[], Generator[None, None, None]]
    ) -> Generator[None, None, Compared]:
        """Compare every request that came to its end by itself. Raises Violation with both outputs.

        Those computed with the present weights come first; ``restore`` brings those of the start back for the others.
        """
        compared, before = Compared(), []
        version = self._rig.scheduler.counters.weights_version
        for handle in handles:
            reason = _why_not(handle) or self._why_not_its_lora(handle)
            if reason is not None:
                compared.skip(reason)
            elif handle.was_computed_with(version):
                yield from self._compare(handle, compared)
            elif handle.was_computed_with(0):
                before.append(handle)
            else:
                compared.skip("computed with other weights")
        if before:
            yield from restore()
        for handle in before:
            yield from self._compare(handle, compared)
        return compared

    def _compare(self, handle: RequestHandle, compared: Compared) -> Generator[None, None, None]:
        alone, logprobs = yield from self._alone(handle)
        # The front end stops a request in the middle of what it would say, and so does the end of its time.
        is_cut = handle.finish_reason == "timeout" or (handle.sampling.stop and handle.finish_reason == "stop")
        most = len(handle.output_ids) if is_cut else None
        if handle.output_ids != alone[:most]:
            raise Violation(
                f"{handle.rid} said {list(handle.output_ids)}, but the same request run alone says {list(alone)}"
            )
        if handle.finish_reason == "timeout":
            logprobs = logprobs[: len(handle.prompt_logprobs)]
        if not _are_alike(handle.prompt_logprobs, logprobs):
            raise Violation(_other_logprobs(handle.rid, handle.prompt_logprobs, logprobs))
        compared.outputs += 1

    def _alone(self, handle: RequestHandle) -> Generator[None, None, _Said]:
        message = handle.message
        asked = message.prompt_logprobs_from, message.prompt_top_logprobs_num
        key = (self._weights, handle.prompt_ids, handle.sampling, *asked, handle.lora_path)
        if key not in self._known:
            self._known[key] = yield from self._run_alone(handle)
        return self._known[key]

    def _run_alone(self, handle: RequestHandle) -> Generator[None, None, _Said]:
        """Give the request to a flushed, idle engine and listen to the scheduler itself; no client is involved."""
        rig, rid = self._rig, f"alone-{len(self._known)}"
        tokens: list[int] = []
        logprobs: list[PromptLogprob] = []
        rig.flush()
        rig.inject(
            msgspec.structs.replace(handle.message, rid=rid, priority=0, return_logprob=False, top_logprobs_num=0)
        )
        for _ in range(_BUDGET_STEPS):
            yield
            for reply in rig.last_replies:
                if isinstance(reply, TokenOutput) and reply.rid == rid:
                    tokens += reply.token_ids
                    logprobs += reply.prompt_logprobs
                    if reply.finish_reason in _NATURAL_ENDS:
                        return tuple(tokens), tuple(logprobs)
                    if reply.finish_reason is not None:
                        raise Violation(f"{handle.rid}, run alone, ended with {reply.finish_reason}: {reply.error}")
        raise Violation(
            f"{handle.rid}, run alone, did not end within {_BUDGET_STEPS} steps: {self._what_is_in_its_way()}"
        )

    def _why_not_its_lora(self, handle: RequestHandle) -> str | None:
        """Why a request cannot run alone now: its name has another LoRA, or none."""
        if handle.message.lora is None:
            return None
        lora = self._rig.scheduler.loras.known.get(handle.message.lora)
        return None if lora is not None and lora.path == handle.lora_path else "its LoRA was unloaded"

    def _what_is_in_its_way(self) -> str:
        books, pressure = self._rig.scheduler.books, self._rig.scheduler.pressure
        paused = "not paused" if books.paused is None else f"generation is paused ({books.paused})"
        kept = "memory is kept back" if pressure.is_on else "no memory is kept back"
        return f"{books.what_is_busy()}; {paused}; {kept}"


def _are_alike(told: Sequence[PromptLogprob], alone: Sequence[PromptLogprob]) -> bool:
    """As many, in the same order, of the same values up to rounding."""
    if len(told) != len(alone):
        return False
    return all(abs(one.logprob - other.logprob) < _LOGPROB_TOLERANCE for one, other in zip(told, alone, strict=True))


def _other_logprobs(rid: str, told: Sequence[PromptLogprob], alone: Sequence[PromptLogprob]) -> str:
    """The first place in which a request was told other logprobs of its prompt than alone."""
    places = range(min(len(told), len(alone)))
    first = next((place for place in places if not _are_alike(told[place : place + 1], alone[place : place + 1])), None)
    if first is None:
        return f"{rid} was told {len(told)} prompt logprobs, but alone it is told {len(alone)}"
    return (
        f"{rid} was told the prompt logprob {told[first].logprob} in place {first} of those that it asked for, but "
        f"alone it is told {alone[first].logprob}"
    )


def _is_repeatable(sampling: SamplingParams) -> bool:
    """Greedy, or sampled with a seed of its own: another seed depends on how many requests came before."""
    return sampling.temperature == 0 or sampling.seed is not None


def _why_not(handle: RequestHandle) -> str | None:
    """Why a request's output cannot be compared; None when it can."""
    if handle.finish_reason not in _NATURAL_ENDS and not (handle.finish_reason == "timeout" and handle.output_ids):
        return f"ended with {handle.finish_reason}" if handle.finished else "not finished"
    return None if _is_repeatable(handle.sampling) else "sampled without a seed"


@functools.lru_cache(maxsize=1024)
def _with_lora(limits: Limits, path: str) -> Limits:
    return msgspec.structs.replace(_roomy(limits), max_loras=1, loras=(("alone", path),))


@functools.lru_cache(maxsize=1024)
def _roomy(limits: Limits) -> Limits:
    """One stage of the same model, with room for a whole context, and without speculation."""
    roomy = Limits.of(EngineConfig(), EMBEDDED_FACTS)
    return msgspec.structs.replace(
        roomy,
        total_pages=max(roomy.total_pages, roomy.pages_for(limits.context_length)),
        context_length=max(roomy.context_length, limits.context_length),
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
        seed=limits.seed,
    )
