"""A recording as a schedule: the same events at the same steps, with prompts and names of its own.

What a schedule cannot say is left out and named: some filters of sampling, prompts that share only their beginning. A
translation is run, and says up to which step the engine does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.config import CHUNKING_OFF, EMBEDDED_MODEL, EMBEDDED_WINDOW_MODEL, EngineConfig
from engine.errors import ConfigError
from engine.limits import Limits
from engine.messages import (
    Completion,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    Grammar,
    GrammarReady,
    Reply,
    SamplingParams,
    TokenOutput,
    UnloadLora,
    UpdateWeights,
)
from engine.plan import Microbatch
from engine.recording import RecordedStep, Recording, RecordingError, read_recording
from engine.scheduler import StepRecord
from scripted.adapters.lockstep.actions import (
    Action,
    AdvanceClock,
    HoldGrammars,
    HoldResults,
    Placed,
    Recipe,
    ReleaseGrammars,
    ReleaseResults,
    action_of,
)
from scripted.adapters.lockstep.bugs.mutants import switched_on
from scripted.adapters.lockstep.configs import limits_of
from scripted.core.schedule import Schedule
from scripted.replay.rerun import replay_engine
from scripted.search.execution import record

__all__ = ["Translation", "schedule_of_recording", "translate"]

_ENDED: Final = (FinishReason.LENGTH, FinishReason.STOP)
# Tokens of an output that is never complete.
_ENDLESS: Final = 90_000


class Translation(msgspec.Struct, frozen=True):
    """``same_steps`` of ``steps`` recorded steps launch the same when the schedule runs; ``notes`` say what is lost."""

    schedule: Schedule
    steps: int
    same_steps: int
    notes: tuple[str, ...]


def schedule_of_recording(path: Path, *, until: int | None = None, mutant: str | None = None) -> Translation:
    """A recording's file as a schedule, up to a step. Raises RecordingError."""
    recording = read_recording(path)
    with switched_on(mutant):
        records = replay_engine(path, until=until)[1]
    return translate(msgspec.structs.replace(recording, steps=recording.steps[:until]), records)


def translate(recording: Recording, replayed: Sequence[StepRecord]) -> Translation:
    """``replayed`` are the records of a replay, as far as it went: they know how long each request became.

    Raises RecordingError for a recording of an engine that the simulated one cannot stand for.
    """
    if recording.header.first_step != 1:
        raise RecordingError(
            f"a schedule begins with the first step, the recording with step {recording.header.first_step}; "
            "record with `engine serve --record FILE`, which keeps all of them"
        )
    translator = _Translator(recording, replayed)
    schedule = Schedule(_config_of(recording.header.limits)).with_placed(translator.placed())
    _, records = record(schedule)
    same = _same_steps(translator, replayed, {one.step: one.microbatch for one in records})
    return Translation(schedule, len(recording.steps), same, tuple(translator.notes()))


class _Translator:
    """``steps`` are the schedule's steps that stand for the recorded ones."""

    def __init__(self, recording: Recording, replayed: Sequence[StepRecord]) -> None:
        self._limits = recording.header.limits
        self._recorded = recording.steps
        self._lengths = _lengths_of(replayed)
        self._stopped = sum([_is_stop(reply) for one in replayed for reply in one.replies])
        self._timed = self._limits.waiting_timeout_s is not None or any(
            _has_deadline(event) for step in recording.steps for event in step.events
        )
        self._recipes: dict[tuple[int, ...], Recipe] = {}
        self._grammars: dict[Grammar, str] = {}
        self._seeds = self._partly_shared = 0
        self._sampled = 0
        self._launch_steps: list[int] = []
        self.names: dict[str, str] = {}
        self.steps: list[int] = []

    def placed(self) -> Iterator[Placed]:
        """The schedule's actions. Results are held and released one by one: each comes in the step in which it came."""
        yield Placed(1, HoldResults())
        if any(isinstance(event, GrammarReady) for step in self._recorded for event in step.events):
            yield Placed(1, HoldGrammars())
        now = 0.0
        fails: dict[int, Action] = {}
        for recorded in self._recorded:
            step = self._step_of(recorded)
            self.steps.append(step)
            if self._timed and recorded.now > now:
                yield Placed(step, AdvanceClock(seconds=recorded.now - now))
            now = recorded.now
            results = [event for event in recorded.events if isinstance(event, Completion)]
            if results:
                yield Placed(step, ReleaseResults(count=len(results)))
            answers = sum([isinstance(event, GrammarReady) for event in recorded.events])
            if answers:
                yield Placed(step, ReleaseGrammars(count=answers))
            for event in recorded.events:
                action = action_of(event, self)
                if isinstance(event, Completion):
                    if action is not None:
                        fails[self._launch_steps[event.microbatch_id]] = action
                elif action is not None:
                    yield Placed(step, action)
            if recorded.plan:
                self._launch_steps.append(step)
        yield from (Placed(step, action) for step, action in fails.items())

    def notes(self) -> Iterator[str]:
        """What the schedule does not say."""
        if self._limits.draft_tokens:
            yield "guesses depend on the text, and a schedule has a text of its own: other guesses hold in it"
        if self._limits.async_scheduling and self._stopped:
            yield (
                f"{self._stopped} requests stopped, with a decode planned ahead; in a schedule they are as long, which "
                "is known in advance"
            )
        if self._partly_shared:
            yield f"{self._partly_shared} prompts share more of another than a schedule can say; here they share less"
        if self._sampled:
            yield f"{self._sampled} requests were sampled with filters that a schedule cannot say; here they are not"

    def _step_of(self, recorded: RecordedStep) -> int:
        """The next step in which all results of the recorded one can be there: each is due ``depth`` steps after its
        launch, where a live pipeline may have been faster.
        """
        step = self.steps[-1] + 1 if self.steps else 1
        for event in recorded.events:
            if isinstance(event, Completion):
                step = max(step, self._launch_steps[event.microbatch_id] + self._limits.depth)
        return step

    # -- for the actions that are read back --

    def name_of(self, rid: str) -> str:
        """What the request of this rid is called here."""
        return self.names.get(rid, "unknown")

    def new_name_of(self, rid: str) -> str:
        """The same for a request that begins."""
        return self.names.setdefault(rid, f"r{len(self.names) + 1}")

    def new_tokens_of(self, message: Generate) -> int:
        """As long as it became."""
        self._sampled += not _can_be_said(message.sampling)
        most = message.sampling.max_new_tokens
        lives = self._lengths.get(message.rid)
        return max(0, min(lives.pop(0) if lives else most, most))

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        """How a schedule makes a prompt that shares with those before it what this one does."""
        common, like = max(((_common(prompt, other), other) for other in self._recipes), default=(0, ()))
        if common < self._limits.page_size and common < len(prompt):
            recipe = Recipe(seed=self._next_seed())
        else:
            recipe = self._recipes[like]
            if common < min(len(prompt), len(like)):
                self._partly_shared += common > recipe.shared > 0
                recipe = Recipe(seed=recipe.seed, shared=min(common, recipe.shared or common), tail=self._next_seed())
        self._recipes.setdefault(prompt, recipe)
        return recipe

    def regex_of(self, grammar: Grammar) -> str:
        """Another one for each grammar, that no output completes: a request is as long as it became."""
        return self._grammars.setdefault(grammar, f"[!-~]{{{_ENDLESS + len(self._grammars)}}}")

    def _next_seed(self) -> int:
        self._seeds += 1
        return self._seeds


def _can_be_said(sampling: SamplingParams) -> bool:
    """Whether a schedule has words for all of this: not for the filters top_p and top_k, nor for several biases."""
    said = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_new_tokens,
        logit_bias=sampling.logit_bias[:1],
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        grammar=sampling.grammar,
    )
    return sampling == said


def _config_of(limits: Limits) -> EngineConfig:
    """The configuration of the embedded model that has these limits. Raises RecordingError when none has."""
    windowed = bool(limits.window_tokens)
    config = EngineConfig(
        model=EMBEDDED_WINDOW_MODEL if windowed else EMBEDDED_MODEL,
        max_window_tokens=limits.window_pages * limits.page_size if windowed else None,
        pp_size=limits.pp_size,
        pp_async_depth=limits.depth - limits.pp_size,
        page_size=limits.page_size,
        max_total_tokens=limits.total_pages * limits.page_size,
        max_running_requests=limits.rows,
        chunked_prefill_size=limits.prefill_budget_tokens if limits.chunking else CHUNKING_OFF,
        max_prefill_tokens=max(limits.prefill_budget_tokens, EngineConfig().max_prefill_tokens)
        if limits.chunking
        else limits.prefill_budget_tokens,
        mixed_chunk=limits.mixed_chunk,
        max_queued_requests=limits.max_queued_requests,
        context_length=limits.context_length,
        radix_cache=limits.radix_cache,
        schedule_policy=limits.schedule_policy,
        priority_preemption=limits.priority_preemption,
        seed=limits.seed,
        max_cached_grammars=limits.max_cached_grammars,
        **_speculation_of(limits),
        waiting_timeout_s=limits.waiting_timeout_s,
        pp_max_micro_batch_size=limits.microbatch_requests,
        dynamic_chunking=limits.dynamic_chunking,
        chunk_parity_tokens=limits.chunk_parity_tokens,
        max_loras=limits.max_loras or None,
        lora=",".join(f"{name}={path}" for name, path in limits.loras),
        host_kv_tokens=limits.host_pages * limits.page_size,
        async_scheduling=limits.async_scheduling,
    )
    try:
        window_tokens = limits_of(config).window_tokens
    except ConfigError as exc:
        raise RecordingError(f"the simulated engine cannot stand for the recorded one: {exc}") from exc
    if window_tokens != limits.window_tokens:
        raise RecordingError(
            f"the simulated engine cannot stand for the recorded one: its window layers see {window_tokens} tokens, "
            f"those of the recorded one {limits.window_tokens}; replay the recording itself"
        )
    return config


def _speculation_of(limits: Limits) -> dict[str, Any]:
    if not limits.draft_tokens:
        return {}
    guessing = {"speculative_num_draft_tokens": limits.draft_tokens}
    if limits.has_draft_model:
        drafter = EMBEDDED_MODEL if limits.drafts_itself else f"{EMBEDDED_MODEL}:{limits.seed + 1}"
        return guessing | {"speculative_algorithm": "draft_model", "speculative_draft_model": drafter}
    patterns = {"speculative_ngram_max": limits.ngram_max, "speculative_ngram_min": limits.ngram_min}
    return guessing | patterns | {"speculative_algorithm": "ngram"}


def _lengths_of(replayed: Sequence[StepRecord]) -> dict[str, list[int]]:
    """How many tokens each request had when it ended by itself, by rid, in the order of its lives."""
    lengths: dict[str, list[int]] = {}
    for one in replayed:
        for reply in one.replies:
            if isinstance(reply, TokenOutput) and reply.finish_reason is not None:
                ended = reply.finish_reason in _ENDED
                # One that did not end by itself would have gone on.
                lengths.setdefault(reply.rid, []).append(reply.completion_tokens if ended else 1 << 30)
    return lengths


def _is_stop(reply: Reply) -> bool:
    return isinstance(reply, TokenOutput) and reply.finish_reason is FinishReason.STOP


def _has_deadline(event: Event) -> bool:
    if isinstance(event, Generate):
        return event.timeout_s is not None or event.waiting_timeout_s is not None
    return isinstance(event, FlushCache | UpdateWeights | UnloadLora) and event.timeout_s is not None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _same_steps(translator: _Translator, replayed: Sequence[StepRecord], launched: dict[int, Microbatch | None]) -> int:
    """How many recorded steps, from the first on, launch in the schedule what they launched then."""
    for count, (one, step) in enumerate(zip(replayed, translator.steps, strict=False)):
        if _shape(one.microbatch, translator.names) != _shape(launched.get(step), {}):
            return count
    return min(len(replayed), len(translator.steps))


def _shape(microbatch: Microbatch | None, names: dict[str, str]) -> object:
    if microbatch is None:
        return None
    return microbatch.mode, [
        (names.get(s.rid, s.rid), s.row, s.start, len(s.token_ids), s.page_start, s.pages, s.emits)
        for s in microbatch.segments
    ]
