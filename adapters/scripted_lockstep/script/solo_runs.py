"""Compares a script's requests with the same requests run alone, on the script's own engine.

Only that engine has the weights. It is flushed and idle, and no client is involved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from engine.core.messages import CallAnswer, Event, PromptLogprob, Reply, SamplingParams, TokenOutput, UpdateWeights
from scripted.core.violation import Violation
from scripted_lockstep.oracle.tokens_alone import (
    BUDGET_STEPS,
    NATURAL_ENDS,
    SaidAlone,
    are_alike,
    is_repeatable,
    other_logprobs,
)
from scripted_lockstep.script.handle import RequestHandle

_Key = tuple[int, tuple[int, ...], SamplingParams, int, int, str | None]


class Compared(msgspec.Struct):
    """The number of compared outputs, and of uncompared ones by reason."""

    outputs: int = 0
    skipped: dict[str, int] = msgspec.field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class SoloRuns:
    """Runs requests alone on a script's own engine, and remembers their outputs by the weights that computed them."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._known: dict[_Key, SaidAlone] = {}
        # The number of the current weights: 0 for the initial ones, a new number after each other update.
        self._weights = 0
        self._updates = itertools.count(1)
        self._asked: dict[str, str | None] = {}

    def note(self, events: Iterable[Event], replies: Iterable[Reply]) -> None:
        """Take note of a step, which may have updated the weights."""
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
        """Compare every request that ended by itself. Raises Violation with both outputs.

        Requests computed with the current weights come first; ``restore`` restores the initial weights for the others.
        """
        compared, before = Compared(), []
        version = self._run.scheduler.counters.weights_version
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
        # Stop strings and time limits cut an output short.
        is_cut = handle.finish_reason == "timeout" or (handle.sampling.stop and handle.finish_reason == "stop")
        most = len(handle.output_ids) if is_cut else None
        if handle.output_ids != alone[:most]:
            raise Violation(
                f"{handle.rid} said {list(handle.output_ids)}, but the same request run alone says {list(alone)}"
            )
        if handle.finish_reason == "timeout":
            logprobs = logprobs[: len(handle.prompt_logprobs)]
        if not are_alike(handle.prompt_logprobs, logprobs):
            raise Violation(other_logprobs(handle.rid, handle.prompt_logprobs, logprobs))
        compared.outputs += 1

    def _alone(self, handle: RequestHandle) -> Generator[None, None, SaidAlone]:
        message = handle.message
        asked = message.prompt_logprobs_from, message.prompt_top_logprobs_num
        key = (self._weights, handle.prompt_ids, handle.sampling, *asked, handle.lora_path)
        if key not in self._known:
            self._known[key] = yield from self._run_alone(handle)
        return self._known[key]

    def _run_alone(self, handle: RequestHandle) -> Generator[None, None, SaidAlone]:
        """Run the request on a flushed, idle engine and read the scheduler's replies; no client is involved."""
        run, rid = self._run, f"alone-{len(self._known)}"
        tokens: list[int] = []
        logprobs: list[PromptLogprob] = []
        run.flush()
        # This engine computes it completely, which checks the work and KV of other engines.
        alone = {"priority": 0, "return_logprob": False, "top_logprobs_num": 0, "prefill_at": None, "deliver": None}
        run.inject(msgspec.structs.replace(handle.message, rid=rid, **alone))
        for _ in range(BUDGET_STEPS):
            yield
            for reply in run.last_replies:
                if isinstance(reply, TokenOutput) and reply.rid == rid:
                    tokens += reply.token_ids
                    logprobs += reply.prompt_logprobs
                    if reply.finish_reason in NATURAL_ENDS:
                        return tuple(tokens), tuple(logprobs)
                    if reply.finish_reason is not None:
                        raise Violation(f"{handle.rid}, run alone, ended with {reply.finish_reason}: {reply.error}")
        raise Violation(
            f"{handle.rid}, run alone, did not end within {BUDGET_STEPS} steps: {self._what_is_in_its_way()}"
        )

    def _why_not_its_lora(self, handle: RequestHandle) -> str | None:
        """Return why a request cannot run alone now: its LoRA's name belongs to another LoRA, or to none."""
        if handle.message.lora is None:
            return None
        lora = self._run.scheduler.features.loras.known.get(handle.message.lora)
        return None if lora is not None and lora.path == handle.lora_path else "its LoRA was unloaded"

    def _what_is_in_its_way(self) -> str:
        books, pressure = self._run.scheduler.books, self._run.scheduler.pressure
        paused = "not paused" if books.paused is None else f"generation is paused ({books.paused})"
        kept = "memory is kept back" if pressure.is_on else "no memory is kept back"
        return f"{books.what_is_busy()}; {paused}; {kept}"


def _why_not(handle: RequestHandle) -> str | None:
    """Return why a request's output cannot be compared; None if it can."""
    if handle.finish_reason not in NATURAL_ENDS and not (handle.finish_reason == "timeout" and handle.output_ids):
        return f"ended with {handle.finish_reason}" if handle.finished else "not finished"
    return None if is_repeatable(handle.sampling) else "sampled without a seed"
