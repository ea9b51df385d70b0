"""A server's recording as a schedule: the same events at the same steps, with the schedule's own prompts and names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.core.config import CHUNKING_OFF, EMBEDDED_MODEL, EMBEDDED_WINDOW_MODEL, EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import Limits
from engine.core.messages import (
    Completion,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    Grammar,
    GrammarReady,
    LoraRead,
    Reply,
    SamplingParams,
    TokenOutput,
    UnloadLora,
    UpdateWeights,
)
from engine.core.recording import RecordedStep as EngineStep
from engine.core.recording import RecordingError, read_recording
from engine.core.scheduler import StepRecord
from scripted.core.action import Action
from scripted.core.schedule import Schedule
from scripted.core.translation import Lengths, RecordedStep, Translated, Translator
from scripted_lockstep.actions import HoldGrammars, HoldLoras, ReleaseGrammars, ReleaseLoras, all_actions
from scripted_lockstep.configs import limits_of
from scripted_lockstep.recordings.replay import replay_engine

# The output length of a request that never ends.
_ENDLESS_TOKENS: Final = 90_000


def schedule_of_recording(path: Path, *, until: int | None = None) -> Translated:
    """Translate a recording's file into a schedule, up to a step.

    Raises RecordingError, also for a recording of an engine that the simulated one cannot represent.
    """
    recording = read_recording(path)
    if recording.header.first_step != 1:
        raise RecordingError(
            f"a schedule begins with the first step, the recording with step {recording.header.first_step}; "
            "record with `engine serve --record FILE`, which keeps all of them"
        )
    # Up to the end of the replay, which gives each request's final length.
    replayed = replay_engine(path, until=until)[1]
    translator = _StepTranslator(recording.header.limits, recording.steps[:until], replayed)
    empty = Schedule(_config_of(recording.header.limits))
    return translator.translated(empty, _steps(recording.steps[:until], replayed), replayed, plan_of)


def plan_of(record: StepRecord, names: Mapping[str, str]) -> object:
    """Return the plan of a step, with these names for the requests."""
    microbatch = record.microbatch
    if microbatch is None:
        return None
    return microbatch.mode, [
        (names.get(s.rid, s.rid), s.row, s.start, len(s.token_ids), s.page_start, s.pages, s.emits)
        for s in microbatch.segments
    ]


def _steps(recorded: Sequence[EngineStep], replayed: Sequence[StepRecord]) -> Iterator[RecordedStep]:
    # Ids count up from 0, and the recording has a checksum of each launch.
    ids = itertools.count()
    for one, again in zip(recorded, itertools.chain(replayed, itertools.repeat(None)), strict=False):
        replies = () if again is None else again.replies
        said = [(reply.rid, reply.token_ids) for reply in replies if isinstance(reply, TokenOutput)]
        yield RecordedStep(one.now, one.events, next(ids) if one.plan else None, said)


class _StepTranslator(Translator):
    def __init__(self, limits: Limits, recorded: Sequence[EngineStep], replayed: Sequence[StepRecord]) -> None:
        events = [event for step in recorded for event in step.events]
        timed = limits.waiting_timeout_s is not None or any(map(_has_deadline, events))
        super().__init__(
            all_actions(),
            depth=limits.depth,
            page_size=limits.page_size,
            lengths=_lengths_of(replayed),
            timed=timed,
            guesses=limits.draft_tokens > 0,
        )
        self._limits = limits
        self._stopped = sum([_is_stop(reply) for one in replayed for reply in one.replies])
        self._has_grammars = any(isinstance(event, GrammarReady) for event in events)
        self._has_loras = any(isinstance(event, LoraRead) for event in events)
        self._grammars: dict[Grammar, str] = {}
        self._sampled = 0

    def batch_of(self, event: Event) -> int | None:
        return event.microbatch_id if isinstance(event, Completion) else None

    def opening(self) -> Iterable[Action]:
        holds = (*[HoldGrammars() for _ in "1" if self._has_grammars], *[HoldLoras() for _ in "1" if self._has_loras])
        return (*super().opening(), *holds)

    def releases(self, events: Sequence[Event]) -> Iterable[Action]:
        yield from super().releases(events)
        if ready := sum([isinstance(event, GrammarReady) for event in events]):
            yield ReleaseGrammars(count=ready)
        if read := sum([isinstance(event, LoraRead) for event in events]):
            yield ReleaseLoras(count=read)

    def own_notes(self) -> Iterator[str]:
        if self._limits.async_scheduling and self._stopped:
            yield (
                f"{self._stopped} requests stopped, with a decode planned ahead; in a schedule they are as long, which "
                "is known in advance"
            )
        if self._sampled:
            yield f"{self._sampled} requests had several biases, and a schedule can say one: here the first"

    # -- for the actions that are read back --

    def new_tokens_of(self, message: Generate) -> int:
        self._sampled += not _can_be_said(message.sampling)
        return self.length_of(message.rid, message.sampling.max_new_tokens)

    def regex_of(self, grammar: Grammar) -> str:
        """Return a regex for each grammar, which no output completes: length decides the end, as recorded."""
        return self._grammars.setdefault(grammar, f"[!-~]{{{_ENDLESS_TOKENS + len(self._grammars)}}}")


def _can_be_said(sampling: SamplingParams) -> bool:
    """Return whether a schedule can express this sampling; it cannot express several biases."""
    return len(sampling.logit_bias) <= 1


def _config_of(limits: Limits) -> EngineConfig:
    """Find the configuration of the embedded model with these limits. Raises RecordingError if there is none."""
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
        max_gap_ms=None if limits.max_gap_s is None else round(1000 * limits.max_gap_s),
        max_gap_steps=limits.max_gap_steps,
        max_loras=limits.max_loras or None,
        lora=",".join(f"{name}={path}" for name, path in limits.loras),
        host_kv_tokens=limits.host_pages * limits.page_size,
        async_scheduling=limits.async_scheduling,
    )
    _check_windows(config, limits)
    return config


def _check_windows(config: EngineConfig, limits: Limits) -> None:
    """Raise RecordingError unless the embedded model with this configuration has the recorded windows."""
    try:
        window_tokens = limits_of(config).window_tokens
    except ConfigError as exc:
        raise RecordingError(f"the simulated engine cannot stand for the recorded one: {exc}") from exc
    if window_tokens != limits.window_tokens:
        raise RecordingError(
            f"the simulated engine cannot stand for the recorded one: its window layers see {window_tokens} tokens, "
            f"those of the recorded one {limits.window_tokens}; replay the recording itself"
        )


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
    lengths = Lengths()
    for reply in (reply for one in replayed for reply in one.replies):
        if isinstance(reply, TokenOutput):
            lengths.tell(reply.rid, len(reply.token_ids), reply.finish_reason)
    return lengths.by_rid


def _is_stop(reply: Reply) -> bool:
    return isinstance(reply, TokenOutput) and reply.finish_reason is FinishReason.STOP


def _has_deadline(event: Event) -> bool:
    if isinstance(event, Generate):
        return event.timeout_s is not None or event.waiting_timeout_s is not None
    return isinstance(event, FlushCache | UpdateWeights | UnloadLora) and event.timeout_s is not None
