"""A stage on OpenVINO: failures that stay in their microbatch, updates, profiles, and the graphs that are kept."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from chained_stages import ChainedStages, limits_for
from safetensors.torch import load_file, save_file

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError, OpenVINOError, StepFailedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, PromptLogprob
from engine.core.plan import Forward, ForwardMode, ProfileSwitch, SamplingSpec, Segment, WeightUpdate
from engine.model.checkpoint import read_configured_facts
from engine.model.runner import StageRunner
from engine.model.stage_slice import StageFacts

pytest.importorskip("openvino")

from engine.model.openvino.compiled import CompiledStage
from engine.model.openvino.conversion import TracedStage

PROMPT = list(b"the same prompt on either backend, longer than a block")
SAMPLED = SamplingSpec(seed=9, temperature=0.8, top_p=0.95, return_logprob=True, top_logprobs_num=3)


def chain_of(**values: object) -> ChainedStages:
    config = EngineConfig(**({"device": "cpu", "context_length": 256, "backend": "openvino"} | values))
    return ChainedStages(config, Limits.of(config, EMBEDDED_FACTS))


@pytest.fixture(scope="module")
def said() -> list[int]:
    return chain_of(backend="torch").generate(0, PROMPT, 20, chunk=64, spec=SAMPLED)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the graphs, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "openvino"


@pytest.mark.parametrize(("chunk", "pp_size"), [(64, 1), (5, 1), (5, 4)])
def test_a_seed_says_what_it_says_on_torch(chunk: int, pp_size: int, said: list[int]) -> None:
    """B01, B02: for all chunk sizes and numbers of stages."""
    assert chain_of(pp_size=pp_size).generate(3, PROMPT, 20, chunk=chunk, spec=SAMPLED) == said


def test_a_retracted_request_goes_on_with_the_same_output(said: list[int]) -> None:
    """B06: prompt and emitted tokens are prefilled again, in another row."""
    assert said[:8] + chain_of().generate(5, PROMPT + said[:8], 12, chunk=10, spec=SAMPLED) == said


def test_batch_companions_do_not_change_what_a_seed_says(said: list[int]) -> None:
    """B01: one forward for a prefill chunk and many decodes of different lengths."""
    chain = chain_of()
    for row in (1, 2):
        chain.forward(chain.segment(row, PROMPT[: 3 * row]))
    output = list(chain.forward(chain.segment(0, PROMPT, spec=SAMPLED), chain.segment(1, [65])).token_ids[:1])
    while len(output) < 20:
        companions = [chain.segment(row, [66 + row]) for row in (1, 2)]
        output.append(chain.forward(companions[0], chain.segment(0, output[-1:]), companions[1]).token_ids[1])
    assert output == said


def test_logprobs_are_those_of_torch() -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02)."""
    answers = [
        chain.forward(chain.segment(0, PROMPT, spec=SAMPLED)) for chain in (chain_of(), chain_of(backend="torch"))
    ]
    own, other = (answer.logprobs[0] for answer in answers)
    assert own is not None
    assert other is not None
    assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [token for token, _ in own.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("chunk", [64, 32, 7])
def test_prompt_logprobs_are_those_of_torch(chunk: int) -> None:
    """C02: the rows that are asked for come before the emitting ones."""
    said = []
    for chain in (chain_of(), chain_of(backend="torch", page_size=32)):
        values: list[PromptLogprob] = []
        for first in range(0, len(PROMPT), chunk):
            last = first + chunk >= len(PROMPT)
            segment = chain.segment(0, PROMPT[first : first + chunk], emits=last, spec=SAMPLED)
            following = -1 if last else PROMPT[first + chunk]
            if max(first, 3) < min(first + chunk, len(PROMPT) - 1):
                segment = msgspec.structs.replace(segment, logprobs_from=max(first, 3), next_id=following)
            values += [value for part in chain.forward(segment).prompt_logprobs for value in part]
        said.append(values)
    own, other = said
    assert len(own) == len(PROMPT) - 4
    assert [one.logprob for one in own] == pytest.approx([one.logprob for one in other], abs=1e-4)


def test_a_cached_prefix_is_read_by_another_row() -> None:
    """B04: the second request's pages are the first one's."""
    chain = chain_of(kv_sanitizer=True)
    whole = chain.forward(chain.segment(0, PROMPT)).token_ids
    pages = tuple(range((chain.limits.pages_for(256) - 1) * 8, -1, -8))[: chain.limits.pages_for(len(PROMPT))]
    sharer = Segment("sharer", 7, len(PROMPT) - 1, tuple(PROMPT[-1:]), 0, pages, True, SamplingSpec(seed=0))
    assert chain.forward(sharer).token_ids == whole


def test_the_last_layer_computes_only_what_is_read() -> None:
    """After its attention: the graph is traced from a module that goes on with the emitting tokens alone."""
    config = EngineConfig(device="cpu", context_length=256, backend="openvino", pp_size=2)
    limits = Limits.of(config, EMBEDDED_FACTS)
    rows = []
    for stage in range(2):
        traced = TracedStage(StageFacts(config, limits, stage), trust_remote_code=False)
        counts: list[int] = []
        for layer in traced.module.base_model.layers:
            layer.mlp.register_forward_hook(lambda _, __, states, own=counts: own.append(states.shape[1]))
        given, _ = traced.compute(9)
        counts.clear()
        traced(given, torch.arange(9), *([torch.tensor([3, 8])] if stage else []))
        rows.append(counts)
    assert (set(rows[0]), rows[1][-1], set(rows[1][:-1])) == ({9}, 2, {9})


def test_a_microbatch_without_emitting_rows_has_no_logits() -> None:
    chain = chain_of()
    plan = Forward(1, ForwardMode.PREFILL, (chain.segment(0, PROMPT, emits=False),))
    assert chain.runners[0].logits(plan).shape == (0, EMBEDDED_FACTS.vocab_size)
    assert chain.forward(chain.segment(1, PROMPT, emits=False)).token_ids == ()


def test_wrong_hidden_states_fail_the_microbatch() -> None:
    chain = chain_of(pp_size=2)
    output = chain.runners[1].forward(chain.plan(chain.segment(0, PROMPT)), torch.zeros(3, 64))
    assert isinstance(output, Completion)
    assert f"must have shape ({len(PROMPT)}, 64), got (3, 64)" in str(output.error)


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (Segment("r", 0, 0, (1,), 0, (10**6,), True), "pages of a segment must be in"),
        (Segment("r", 10**6, 0, (1,), 0, (1,), True), "row of a segment must be in"),
        (Segment("r", 0, 0, (1, EMBEDDED_FACTS.vocab_size), 0, (1,), True), "token ids must be in 0..263, got 1..264"),
        (Segment("r", 0, 0, (-1,), 0, (1,), True), "token ids must be in 0..263"),
        (Segment("r", 0, 10**6, (1,), 0, (1,), True), "places of pages of a segment must be in"),
    ],
)
def test_a_broken_plan_fails_its_microbatch(segment: Segment, text: str) -> None:
    """A05: on every stage, and none of them dies of it."""
    chain = chain_of(pp_size=2)
    assert text in str(chain.forward(segment).error)
    assert chain.forward(chain.segment(1, PROMPT)).error is None


def test_the_sanitizer_finds_a_page_with_two_owners() -> None:
    chain = chain_of(kv_sanitizer=True)
    ids = tuple(range(1, 36))
    chain.forward(Segment("a", 0, 0, ids, 0, (0, 1), False, SamplingSpec(seed=0)))
    chain.forward(Segment("b", 1, 0, ids[::-1], 0, (0, 2), False, SamplingSpec(seed=0)))
    with pytest.raises(IntegrityError, match=r"KV of a \(row 0\) at position"):
        chain.forward(Segment("a", 0, 35, (6,), 0, (), True))


@pytest.mark.parametrize("pp_size", [1, 2])
def test_after_an_update_the_stages_are_those_of_the_other_weights(pp_size: int) -> None:
    """The KV pool stays where it is; tokens are those of an engine that was started with the weights."""
    chain, other = chain_of(pp_size=pp_size), chain_of(pp_size=pp_size, seed=7)
    before = chain.generate(0, PROMPT, 6, chunk=64, spec=SamplingSpec(seed=0))
    pools = [runner.model.pool for runner in chain.runners]
    for runner in chain.runners:
        assert runner.prepare(WeightUpdate(90, "embedded:7")) is None
    for runner in chain.runners:
        runner.settle(90, commit=True)
    assert [runner.model.pool for runner in chain.runners] == pools
    assert {runner.model.backend for runner in chain.runners} == {"openvino"}
    after = chain.generate(1, PROMPT, 6, chunk=64, spec=SamplingSpec(seed=0))
    assert after == other.generate(1, PROMPT, 6, chunk=64, spec=SamplingSpec(seed=0))
    assert after != before


def test_a_profile_shows_the_time_in_openvino(tmp_path: Path) -> None:
    """Operators see and do what the routes promise (C06)."""
    runner = (chain := chain_of()).runners[0]
    assert runner.prepare(ProfileSwitch(90, str(tmp_path))) is None
    chain.forward(chain.segment(0, PROMPT))
    assert runner.prepare(ProfileSwitch(91, None)) is None
    events = json.loads((tmp_path / "stage-0.json").read_text())["traceEvents"]
    assert "stage on openvino" in {event["name"] for event in events}


def test_a_graph_is_converted_once_a_checkpoint(
    kept: Path, caplog: pytest.LogCaptureFixture, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of("llama"), folder)
    config = EngineConfig(model=str(folder), backend="openvino")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            StageRunner(config, limits_for(config), 0)
        assert len(list(kept.iterdir())) == caplog.text.count("converting layers") == 1
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] * 2
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        changed = ChainedStages(config, limits_for(config))
    assert len(list(kept.iterdir())) == caplog.text.count("converting layers") == 2
    plain = config.model_copy(update={"backend": "torch"})
    torchs = ChainedStages(plain, limits_for(plain))
    own, expected = (chain.logits(chain.segment(0, PROMPT)) for chain in (changed, torchs))
    assert float((own - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_weights_of_8_bits_stay_close_and_are_kept_apart(
    family: str, kept: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    config = EngineConfig(model=str(checkpoint_of(family)), backend="openvino", pp_size=2)
    rounded = config.model_copy(update={"weights": "int8"})
    chains = [ChainedStages(one, limits_for(one)) for one in (config, rounded)]
    whole, own = (chain.logits(chain.segment(0, PROMPT)) for chain in chains)
    assert 1e-4 < float((own - whole).norm() / whole.norm()) < 0.15
    assert len(list(kept.iterdir())) == 4


def test_a_cache_of_8_bits_stays_close_whatever_the_chunks(kept: Path, checkpoint_of: Callable[[str], Path]) -> None:
    """B01: it takes less than half of the memory of fp32, and the same graph."""
    config = EngineConfig(model=str(checkpoint_of("llama")), backend="openvino", dtype="float32")
    rounded = config.model_copy(update={"kv_cache_dtype": "u8"})
    whole, own = (ChainedStages(one, limits_for(one)) for one in (config, rounded))
    expected, *others = (last_logits(*place) for place in ((whole, 0, 64), (own, 0, 64), (own, 1, 7)))
    for found in others:
        assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.05
    assert len(list(kept.iterdir())) == 1
    pools = [chain.runners[0].model.pool for chain in (whole, own)]
    sizes = [sum(array.nbytes for pair in pool._arrays for array in pair) for pool in pools]
    assert sizes[1] < sizes[0] / 2
    facts = [read_configured_facts(one) for one in (config, rounded)]
    assert sizes[1] / sizes[0] == pytest.approx(facts[1].kv_bytes_per_token / facts[0].kv_bytes_per_token)


def last_logits(chain: ChainedStages, row: int, chunk: int) -> torch.Tensor:
    for first in range(0, len(PROMPT), chunk):
        logits = chain.logits(chain.segment(row, PROMPT[first : first + chunk]))
    return logits[-1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stage_has_packed_its_weights_before_its_first_microbatch(
    monkeypatch: pytest.MonkeyPatch, kept: Path, is_kept: bool
) -> None:
    """Packed weights are not kept twice, no client waits for the packing, and the pool is unchanged."""
    if is_kept:
        chain_of()
    forwards: list[bool] = []
    given_back: list[Path | None] = []

    @contextmanager
    def noted(file: Path | None) -> Iterator[None]:
        before = len(forwards)
        yield
        given_back.append(file)
        assert len(forwards) > before

    forward = CompiledStage.forward
    monkeypatch.setattr(CompiledStage, "forward", lambda *given: (forwards.append(True), forward(*given))[1])
    monkeypatch.setattr("engine.model.openvino.stage.read_pages_given_back", noted)
    pool = chain_of().runners[0].model.pool
    assert [file.name for file in given_back if file is not None] == ["stage.bin"]
    assert len(list(kept.glob("*/stage.bin"))) == 1
    assert not any(array.any() for pair in pool._arrays for array in pair)


def test_a_graph_that_cannot_be_read_is_converted_anew(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = chain_of().generate(0, PROMPT, 4, chunk=64, spec=SamplingSpec(seed=0))
    (graph,) = kept.glob("*/stage.xml")
    graph.write_text(graph.read_text()[:1000])
    assert chain_of().generate(0, PROMPT, 4, chunk=64, spec=SamplingSpec(seed=0)) == said
    assert "is converted for OpenVINO again" in caplog.text
    assert len(graph.read_text()) > 1000


def test_a_graph_that_cannot_be_written_is_used_all_the_same(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr("openvino.save_model", full)
    chain = chain_of()
    assert chain.forward(chain.segment(0, PROMPT)).error is None
    assert "cannot be cached" in caplog.text
    assert list(kept.iterdir()) == []


def test_another_version_of_openvino_leaves_the_model_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checkpoint_of: Callable[[str], Path]
) -> None:
    monkeypatch.setitem(sys.modules, "engine.model.openvino.stage", None)
    config = EngineConfig(model=str(checkpoint_of("llama")), page_size=32)
    assert StageRunner(config, limits_for(config), 0).model.backend == "torch"
    assert "must have the version that 'lockstep-engine[openvino]' installs" in caplog.text


def test_a_folder_that_others_may_write_is_not_used(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    chain = chain_of()
    assert chain.forward(chain.segment(0, PROMPT)).error is None
    assert "must belong to this user and be writable by no other" in caplog.text
    assert list(kept.iterdir()) == []


def test_a_graph_that_differs_is_refused_and_auto_falls_back(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checkpoint_of: Callable[[str], Path]
) -> None:
    monkeypatch.setattr("engine.model.openvino.stage._TOLERANCES", {torch.float32: 0.0})
    model = str(checkpoint_of("llama"))
    asked, auto = (EngineConfig(model=model, page_size=32, backend=name) for name in ("openvino", "auto"))
    with pytest.raises(OpenVINOError, match="must equal transformers, but differs by"):
        StageRunner(asked, limits_for(asked), 0)
    assert StageRunner(auto, limits_for(auto), 0).model.backend == "torch"
    assert "stage 0 is computed by torch, not by OpenVINO: the converted LlamaForCausalLM" in caplog.text
    assert list(kept.iterdir()) == []


def test_a_model_that_cannot_be_converted_is_left_to_torch(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checkpoint_of: Callable[[str], Path]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StepFailedError("it has sinks")

    monkeypatch.setattr("engine.model.openvino.conversion.TorchScriptPythonDecoder", broken)
    config = EngineConfig(model=str(checkpoint_of("llama")), page_size=32)
    assert StageRunner(config, limits_for(config), 0).model.backend == "torch"
    assert "LlamaForCausalLM cannot be converted for OpenVINO: it has sinks" in caplog.text
