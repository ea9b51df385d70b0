"""Verifying drafts on the last stage: what is kept of a forward, and that a real model says what it says without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chained_stages import DEVICE
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.limits import Limits, embedded_facts
from engine.core.messages import Completion, Generate, SamplingParams, TokenLogprob, TokenOutput
from engine.core.plan import Forward, ForwardMode, Microbatch, Segment
from engine.core.scheduler import Scheduler
from engine.model.runner import StageRunner
from engine.model.verification import verify

# Three tokens share nearly all of the probability, so that some guesses hold and some do not.
FEW = ((33, 60.0), (34, 60.0), (35, 60.0))


def segment(rid: str, ids: tuple[int, ...], *, drafts: int = 0, emits: bool = True) -> Segment:
    return Segment(rid, 0, 10, ids, 0, (), emits, drafts=drafts)


def test_what_follows_a_wrong_guess_is_dropped() -> None:
    batch = Forward(
        3,
        ForwardMode.DECODE,
        (segment("a", (1, 5, 6, 7), drafts=3), segment("b", (2,)), segment("c", (3, 9), drafts=1)),
    )
    logprobs = tuple(TokenLogprob(-float(number)) for number in range(7))
    result = verify(batch, (5, 6, 8, 4, 20, 9, 30), logprobs)
    assert result == Completion(
        microbatch_id=3, token_ids=(5, 6, 8, 20, 9, 30), accepted=(2, 1), logprobs=(*logprobs[:3], *logprobs[4:])
    )


@pytest.mark.parametrize(
    ("dead_ends", "accepted", "tokens"),
    [((), (2, 1), (5, 6, 8, 9, 30)), ((2,), (1, 1), (5, 6, 9, 30)), ((1, 2, 5), (0, 0), (5, 9)), ((3,), (2, 1), None)],
)
def test_a_guess_into_a_dead_end_is_not_accepted(
    dead_ends: tuple[int, ...], accepted: tuple[int, ...], tokens: tuple[int, ...] | None
) -> None:
    """B11: what was chosen after it is of no use; the next decode meets that end by itself."""
    batch = Forward(3, ForwardMode.DECODE, (segment("a", (1, 5, 6, 7), drafts=3), segment("c", (3, 9), drafts=1)))
    result = verify(batch, (5, 6, 8, 4, 9, 30), (), dead_ends)
    assert result.accepted == accepted
    assert result.token_ids == (tokens or (5, 6, 8, 9, 30))


def test_parts_of_prompts_choose_nothing() -> None:
    batch = Forward(1, ForwardMode.MIXED, (segment("p", (1, 2), emits=False), segment("a", (1, 5), drafts=1)))
    assert verify(batch, (4, 7), ()) == Completion(microbatch_id=1, token_ids=(4,), accepted=(0,))


class RealEngine:
    """A scheduler over all stages of the embedded model, in this process."""

    def __init__(self, **config: object) -> None:
        settings = EngineConfig(device=DEVICE, context_length=256, max_total_tokens=1024, kv_sanitizer=True, **config)
        self.limits = Limits.of(settings, embedded_facts(settings.model))
        self.scheduler = Scheduler(self.limits)
        self.runners = [StageRunner(settings, self.limits, stage) for stage in range(self.limits.pp_size)]

    def run(self, *messages: Generate) -> dict[str, list[tuple[int, TokenLogprob | None]]]:
        """Run requests and return each one's tokens, with the requested logprobs."""
        said: dict[str, list[tuple[int, TokenLogprob | None]]] = {message.rid: [] for message in messages}
        events: list[object] = list(messages)
        while True:
            result = self.scheduler.step(events, 0.0)
            for reply in result.replies:
                assert isinstance(reply, TokenOutput), reply
                assert reply.error is None, reply
                said[reply.rid] += zip(reply.token_ids, reply.logprobs or (None,) * len(reply.token_ids), strict=True)
            if result.microbatch is None and not events and self.scheduler.is_fully_idle:
                return said
            events = [] if result.microbatch is None else [self._compute(result.microbatch)]

    def _compute(self, microbatch: Microbatch) -> Completion:
        hidden: torch.Tensor | None = None
        for runner in self.runners:
            output = runner.forward(microbatch, hidden)
            hidden = output if isinstance(output, torch.Tensor) else None
        assert isinstance(output, Completion)
        return output


def messages_of(**sampling: object) -> Iterator[Generate]:
    for number in range(3):
        ids = tuple((number * 17 + place * 5) % 250 for place in range(9 + number * 7))
        params = SamplingParams(
            **{"max_new_tokens": 30, "temperature": 0.0, "logit_bias": FEW, "seed": number} | sampling
        )
        yield Generate(
            rid=f"r{number}", prompt_ids=ids, sampling=params, return_logprob=number == 1, top_logprobs_num=2
        )


@pytest.mark.parametrize(("model", "stages"), thinned([("embedded-window", 4), ("embedded", 1)], one_in=2))
@pytest.mark.parametrize(
    "sampling",
    thinned(
        [
            {},
            {"temperature": 1.0},
            {"temperature": 1.0, "stop_token_ids": (34,), "min_new_tokens": 12},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 3},
            {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.3},
        ],
        one_in=2,
    ),
    ids=["greedy", "sampled", "stops", "filtered", "penalties"],
)
def test_a_real_model_says_the_same_without_guesses(model: str, stages: int, sampling: dict[str, object]) -> None:
    """C04. Tokens are equal, and their logprobs up to rounding."""
    config = {"model": model, "pp_size": stages, "page_size": 4, "chunked_prefill_size": 32}
    plain = RealEngine(**config)
    guessing = RealEngine(**config, speculative_algorithm="ngram", speculative_ngram_min=1)
    expected, found = (engine.run(*messages_of(**sampling)) for engine in (plain, guessing))
    for rid, tokens in expected.items():
        assert [token for token, _ in found[rid]] == [token for token, _ in tokens]
        for (_, one), (_, other) in zip(tokens, found[rid], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
    stats = guessing.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.forward_ct <= plain.scheduler.stats().forward_ct


@pytest.mark.parametrize("stages", thinned([1, 4], one_in=2))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_draft_model_changes_nothing_that_is_said(stages: int, sampling: dict[str, object]) -> None:
    config = {"pp_size": stages, "page_size": 8, "chunked_prefill_size": 8}
    draft = {"speculative_algorithm": "draft_model", "speculative_draft_model": "embedded:7"}
    plain, guessing = RealEngine(**config), RealEngine(**config, **draft)
    messages = [*messages_of(logit_bias=(), **sampling)]
    expected, found = plain.run(*messages), guessing.run(*messages)
    assert [[token for token, _ in said] for said in found.values()] == [
        [token for token, _ in said] for said in expected.values()
    ]
    stats = guessing.scheduler.stats()
    assert stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("stages", [1, 4])
def test_a_model_guesses_itself_right(stages: int) -> None:
    """Its KV equals the target model's: over chunks, cached prefixes, and after accepted guesses."""
    draft = {"speculative_algorithm": "draft_model", "speculative_draft_model": "embedded"}
    engine = RealEngine(pp_size=stages, page_size=8, chunked_prefill_size=8, **draft)
    for _ in range(2):
        engine.run(*messages_of(logit_bias=()))
    stats = engine.scheduler.stats()
    assert stats.drafted_tokens > 100
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.cached_tokens > 0
