"""Weight updates on real weights: all stages take them or none does, in order with the microbatches around them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handmade_plans import PlanWriter, generate, run, take
from stage_farm import StageFarm
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import Forward, ForwardMode, Microbatch, SamplingSpec, Segment, WeightUpdate
from engine.model.embedded import embedded_folder, write_embedded
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.pipeline.staged import StagedPipeline

PROMPT = list(b"A prompt for all weights.")
TOKENS = 8

Pipeline = LocalPipeline | StagedPipeline


def limits(pp_size: int = 1) -> Limits:
    return Limits.of(EngineConfig(pp_size=pp_size), EMBEDDED_FACTS)


def update(source: str | None, number: int = 100) -> Microbatch:
    return WeightUpdate(number, source)


def local(**values: object) -> LocalPipeline:
    config = EngineConfig(device="cpu", **values)  # type: ignore[arg-type]
    return LocalPipeline(StageRunner(config, limits(), 0))


@pytest.fixture(scope="module")
def said(_one_torch_thread: None) -> dict[int, list[int]]:
    """The outputs of engines that were started with the weights of a seed, by the seed."""
    return {seed: generate(local(seed=seed), PlanWriter(limits()), 0, PROMPT, TOKENS) for seed in (0, 7)}


@pytest.fixture(params=["one stage", "two stages"])
def pipeline(request: pytest.FixtureRequest, farm: StageFarm, private_dir: Path) -> Iterator[Pipeline]:
    if request.param == "one stage":
        yield local(kv_sanitizer=True)
        return
    staged = StagedPipeline(private_dir, 2)
    pids = farm.start(EngineConfig(device="cpu", pp_size=2, kv_sanitizer=True), private_dir)
    yield staged
    staged.close()
    farm.reap(pids)


def test_after_an_update_the_engine_is_that_of_the_other_weights(
    pipeline: Pipeline, said: dict[int, list[int]]
) -> None:
    """C06, B15: and the configured weights come back the same way."""
    assert said[0] != said[7]
    writer = PlanWriter(limits())
    assert generate(pipeline, writer, 0, PROMPT, TOKENS) == said[0]
    assert run(pipeline, update("embedded:7")).error is None
    assert generate(pipeline, writer, 1, PROMPT, TOKENS) == said[7]
    assert run(pipeline, update(None)).error is None
    assert generate(pipeline, writer, 2, PROMPT, TOKENS) == said[0]


def test_what_is_launched_behind_an_update_waits_for_it(pipeline: Pipeline, said: dict[int, list[int]]) -> None:
    writer = PlanWriter(limits())
    pipeline.launch(update("embedded:7"))
    assert take(pipeline).error is None
    pipeline.launch(writer.plan(0, PROMPT))
    assert take(pipeline).token_ids == tuple(said[7][:1])


def _missing_weight(folder: Path) -> str:
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return "must hold the weight model.layers.3.mlp.up_proj.weight"


def _infinite_weight(folder: Path, value: float = math.nan) -> str:
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][0, 1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return "the weight model.layers.3.mlp.up_proj.weight must be finite in torch.float32"


def _other_model(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    return "has rms_norm_eps=0.5, and the running model"


def _truncated(folder: Path) -> str:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return "must be a whole safetensors file"


def _nothing(folder: Path) -> str:
    shutil.rmtree(folder)
    return "which is not a folder here"


@pytest.mark.parametrize(
    "damage", thinned([_missing_weight, _infinite_weight, _other_model, _truncated, _nothing], one_in=2)
)
def test_a_folder_that_cannot_be_taken_leaves_all_stages_as_they_were(
    damage: Callable[[Path], str], pipeline: Pipeline, said: dict[int, list[int]], tmp_path: Path
) -> None:
    """C11: the weight that is missing is one of the last stage's; the first stage had prepared its own."""
    folder = tmp_path / "other"
    folder.mkdir()
    write_embedded(folder, 7)
    why = damage(folder)
    writer = PlanWriter(limits())
    generate(pipeline, writer, 0, PROMPT, 2)
    assert why in str(run(pipeline, update(str(folder))).error)
    assert generate(pipeline, writer, 1, PROMPT, TOKENS) == said[0]


def test_a_stage_that_fails_alone_keeps_the_others_back(pipeline: Pipeline, said: dict[int, list[int]]) -> None:
    """A05: the failure is the update's, and the next update succeeds."""
    pipeline.fail_next_step(1 if isinstance(pipeline, StagedPipeline) else 0)
    assert "injected" in str(run(pipeline, update("embedded:7")).error)
    assert generate(pipeline, PlanWriter(limits()), 0, PROMPT, TOKENS) == said[0]
    assert run(pipeline, update("embedded:7")).error is None
    assert generate(pipeline, PlanWriter(limits()), 1, PROMPT, TOKENS) == said[7]


def test_a_folder_may_be_overwritten_once_it_is_loaded(said: dict[int, list[int]], tmp_path: Path) -> None:
    """C11: what a trainer writes into the folder next is not served before it is asked for."""
    write_embedded(tmp_path, 0)
    engine = local(model=str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write((embedded_folder(7) / "model.safetensors").read_bytes())
    writer = PlanWriter(limits())
    assert generate(engine, writer, 0, PROMPT, TOKENS) == said[0]
    assert run(engine, update(str(tmp_path))).error is None
    assert generate(engine, writer, 1, PROMPT, TOKENS) == said[7]


@pytest.mark.usefixtures("_one_torch_thread")
def test_what_the_caller_is_told_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A client may send any path, as often as it likes: the log is not its to fill."""
    runner = StageRunner(EngineConfig(device="cpu"), limits(), 0)
    assert "not a folder here" in str(runner.prepare(update("no/such\x00")))
    assert not caplog.records


def test_the_sanitizer_finds_kv_of_the_weights_before() -> None:
    """B15: the epoch of a page is that of the engine."""
    runner = StageRunner(EngineConfig(device="cpu", kv_sanitizer=True, page_size=4), limits(), 0)
    runner.forward(
        Forward(1, ForwardMode.PREFILL, (Segment("a", 0, 0, (1, 2, 3, 4), 0, (0,), False, SamplingSpec(0)),))
    )
    hit = Forward(3, ForwardMode.PREFILL, (Segment("b", 1, 4, (5,), 0, (0, 1), True, SamplingSpec(0)),))
    runner.forward(hit)
    assert runner.prepare(update("embedded:7")) is None
    runner.settle(100, commit=True)
    with pytest.raises(IntegrityError, match="is older than the weights"):
        runner.forward(hit)
