"""A decode that was planned before its token was known gives what it gives when that is known, and so do its results.

Taken from the host, where a stage computes when it is asked, and from the device, where it launches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from ahead_of_results import PROMPTS, SPECS, Flight, results_of, stage_of
from chained_stages import ChainedStages
from thinned import thinned
from tiny_checkpoints import WINDOW

from benchmarks.gpu.stand_ins import stand_ins
from engine.core.plan import UNKNOWN_TOKEN, SamplingSpec

AHEAD = [UNKNOWN_TOKEN]


def assert_alike(stage: ChainedStages, plain: ChainedStages) -> None:
    """Tokens, logprobs, and what the host has noted of every slot."""
    found, expected = results_of(stage, ahead=True), results_of(plain, ahead=False)
    assert [result.error for result in expected] == [None] * len(expected)
    assert found == expected
    assert stage.runners[0].slots_digest() == plain.runners[0].slots_digest()
    assert stage.runners[0].counters == plain.runners[0].counters


@pytest.mark.parametrize("early", [False, True], ids=["asked", "launched"])
@pytest.mark.parametrize(("family", "window"), thinned([("mistral_window", WINDOW), ("qwen3", 0)], one_in=2))
def test_a_token_that_is_not_known_is_the_one_that_was_chosen(
    family: str, window: int, early: bool, checkpoint_of: Callable[[str], Path]
) -> None:
    """C02: greedy and sampled, in changing company, beside prompts and in a row with another request."""
    folder = checkpoint_of(family)
    values = {"attention_backend": "sdpa", "window": window}
    stage = stage_of(folder, ahead=True, early=early, **values)
    assert_alike(stage, stage_of(folder, ahead=False, **values))


def test_recorded_decodes_take_it_from_the_device(checkpoint_of: Callable[[str], Path]) -> None:
    """A graph's inputs are written before each replay, and padding takes no row's token."""
    folder = checkpoint_of("qwen3")
    values = {"cuda_graphs": "on", "max_running_requests": 8}
    with stand_ins():
        assert_alike(stage_of(folder, ahead=True, early=True, **values), stage_of(folder, ahead=False, **values))


def test_openvino_takes_it_from_the_host(checkpoint_of: Callable[[str], Path]) -> None:
    """OpenVINO's batches continue from one step to the next."""
    pytest.importorskip("openvino")
    folder = checkpoint_of("qwen3")
    values = {"backend": "openvino", "page_size": 32}
    assert_alike(stage_of(folder, ahead=True, **values), stage_of(folder, ahead=False, **values))


@pytest.mark.parametrize("early", [False, True], ids=["asked", "launched"])
def test_a_token_that_never_came_harms_no_other_row(early: bool, checkpoint_of: Callable[[str], Path]) -> None:
    """A05: the requests of a failed microbatch have ended; what was planned ahead for them goes on from id 0."""
    folder = checkpoint_of("qwen3")
    third_row = stage_of(folder, ahead=False).generate(2, PROMPTS[2], 3, chunk=99, spec=SPECS[2])
    results = []
    for ahead in (False, True):
        stage = stage_of(folder, ahead=ahead, early=early and ahead)
        runner, flight = stage.runners[0], Flight(stage.runners[0])
        after = [AHEAD if ahead else [token] for token in third_row]
        lost = AHEAD if ahead else [0]
        flight.give(stage.plan(*[stage.segment(row, PROMPTS[row], spec=SPECS[row]) for row in (0, 1, 2)]))
        runner.fail_next()
        flight.give(stage.plan(stage.segment(0, lost), stage.segment(1, lost)))
        flight.give(stage.plan(stage.segment(0, lost), stage.segment(2, after[0]), stage.segment(1, lost)))
        # The next request of a row is checked again.
        stage.done.pop(0)
        flight.give(stage.plan(stage.segment(0, PROMPTS[3], spec=SPECS[3]), stage.segment(2, after[1])))
        results.append(flight.rest())
        assert runner._record._abandoned == {1}
    assert "a failure was injected" in str(results[1][1].error)
    assert results[1] == results[0]
    assert [result.token_ids[1] for result in results[1][2:]] == third_row[1:]


@pytest.mark.parametrize("waits_for", ["what it has said", "logits of its prompt"])
def test_what_the_host_must_know_is_not_launched(waits_for: str, checkpoint_of: Callable[[str], Path]) -> None:
    """A prompt in three parts, the last of which waits: the tokens of the first two are noted with their results."""
    folder = checkpoint_of("qwen3")
    scored = waits_for == "logits of its prompt"
    penalties = {} if scored else {"repetition_penalty": 50.0, "frequency_penalty": 2.0}
    results = []
    for ahead in (False, True):
        stage = stage_of(folder, ahead=ahead, early=ahead)
        flight, said = Flight(stage.runners[0], depth=3), list(PROMPTS[1])
        for number, ids in enumerate((PROMPTS[3][:8], PROMPTS[3][8:16], PROMPTS[3][16:]), start=1):
            spec = SamplingSpec(seed=0, **penalties)
            part = stage.segment(0, ids, emits=number == 3, spec=spec)
            if scored and part.emits:
                part = msgspec.structs.replace(part, logprobs_from=part.start)
            beside = stage.segment(1, AHEAD if ahead and number > 1 else said, spec=SPECS[1])
            done = flight.give(stage.plan(part, beside))
            assert len(done) == (number if number == 3 or not ahead else 0)
            said = [done[-1].token_ids[-1]] if done else said
        # Goes on from a token that was not launched.
        flight.give(stage.plan(stage.segment(1, AHEAD if ahead else said)))
        results.append(flight.rest())
    assert results[1] == results[0]
    assert len(results[0][2].prompt_logprobs) == scored
