"""Sleep on real weights: memory is really given back, and what wakes computes what was computed before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from handmade_plans import PlanWriter, generate, run
from stage_farm import StageFarm
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import SleepSwitch, WeightUpdate
from engine.model.checkpoint import read_facts
from engine.model.embedded import embedded_folder, write_embedded
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.pipeline.staged import StagedPipeline

PROMPT = list(b"A prompt before the sleep and after it.")
TOKENS = 6
Pipeline = LocalPipeline | StagedPipeline

pytestmark = pytest.mark.usefixtures("_one_torch_thread")


def limits(config: EngineConfig) -> Limits:
    return Limits.of(config, EMBEDDED_FACTS)


def local(**values: object) -> LocalPipeline:
    config = EngineConfig(device="cpu", kv_sanitizer=True, **values)  # type: ignore[arg-type]
    return LocalPipeline(StageRunner(config, limits(config), 0))


@pytest.fixture(params=thinned(["two stages", "one stage"], one_in=2))
def pipeline(request: pytest.FixtureRequest, farm: StageFarm, private_dir: Path) -> Iterator[Pipeline]:
    if request.param == "one stage":
        yield local()
        return
    staged = StagedPipeline(private_dir, 2)
    pids = farm.start(EngineConfig(device="cpu", pp_size=2, kv_sanitizer=True), private_dir)
    yield staged
    staged.close()
    farm.reap(pids)


def test_what_wakes_says_what_it_said_before(pipeline: Pipeline) -> None:
    writer = PlanWriter(limits(EngineConfig()))
    before = generate(pipeline, writer, 0, PROMPT, TOKENS)
    for level in (1, 2):
        assert run(pipeline, SleepSwitch(100 + level, level)).error is None
    assert run(pipeline, SleepSwitch(103, 0)).error is None
    assert generate(pipeline, writer, 1, PROMPT, TOKENS) == before


def test_an_update_while_asleep_is_what_it_wakes_with(pipeline: Pipeline) -> None:
    writer = PlanWriter(limits(EngineConfig()))
    before = generate(pipeline, writer, 0, PROMPT, TOKENS)
    run(pipeline, SleepSwitch(100, 2))
    assert "which is not a folder here" in str(run(pipeline, WeightUpdate(101, "/nowhere")).error)
    assert run(pipeline, WeightUpdate(102, "embedded:7")).error is None
    assert run(pipeline, SleepSwitch(103, 0)).error is None
    after = generate(pipeline, writer, 1, PROMPT, TOKENS)
    assert after == generate(local(seed=7), PlanWriter(limits(EngineConfig())), 0, PROMPT, TOKENS) != before


def test_a_stage_that_fails_to_wake_leaves_all_asleep(pipeline: Pipeline) -> None:
    writer = PlanWriter(limits(EngineConfig()))
    before = generate(pipeline, writer, 0, PROMPT, TOKENS)
    run(pipeline, SleepSwitch(100, 1))
    pipeline.fail_next_step(1 if isinstance(pipeline, StagedPipeline) else 0)
    assert "a failure was injected" in str(run(pipeline, SleepSwitch(101, 0)).error)
    assert run(pipeline, SleepSwitch(102, 0)).error is None
    assert generate(pipeline, writer, 1, PROMPT, TOKENS) == before


def test_files_that_have_changed_meanwhile_are_not_taken_for_the_old_weights(tmp_path: Path) -> None:
    """The trainer has written the next weights into the same folder: a wake must not serve them as the last ones."""
    write_embedded(tmp_path, 0)
    pipeline, writer = local(model=str(tmp_path)), PlanWriter(limits(EngineConfig()))
    run(pipeline, SleepSwitch(100, 1))
    write_embedded(tmp_path, 7)
    refused = run(pipeline, SleepSwitch(101, 0)).error
    assert refused is not None
    assert str(tmp_path) in refused
    assert "have changed since it read them" in refused
    assert run(pipeline, WeightUpdate(102, str(tmp_path))).error is None
    assert run(pipeline, SleepSwitch(103, 0)).error is None
    said = generate(pipeline, writer, 0, PROMPT, TOKENS)
    assert said == generate(local(seed=7), PlanWriter(limits(EngineConfig())), 0, PROMPT, TOKENS)


def test_a_stage_that_sleeps_computes_nothing() -> None:
    pipeline, writer = local(), PlanWriter(limits(EngineConfig()))
    run(pipeline, SleepSwitch(100, 1))
    with pytest.raises(IntegrityError, match="a sleeping stage must not compute"):
        run(pipeline, writer.plan(0, PROMPT))


def test_memory_is_given_back_and_taken_again(tmp_path: Path) -> None:
    """67 MB of weights and 67 MB of KV, of which asleep at most a quarter is left."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    heads = {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "eos_token_id": 257}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    made.save_pretrained(tmp_path)
    shutil.copy(embedded_folder(0) / "tokenizer.json", tmp_path)
    del made
    config = EngineConfig(device="cpu", model=str(tmp_path), backend="torch", max_total_tokens=16_384)
    limits_here = Limits.of(config, read_facts(config))
    pipeline = LocalPipeline(StageRunner(config, limits_here, 0))
    writer, sizes = PlanWriter(limits_here), []

    def touch_and_note() -> None:
        pool = pipeline._runner.model.pool
        pool.keys.fill_(0.0)
        pool.values.fill_(0.0)
        sizes.append(_resident_bytes())

    before = generate(pipeline, writer, 0, PROMPT, TOKENS)
    touch_and_note()
    run(pipeline, SleepSwitch(100, 1))
    touch_and_note()
    run(pipeline, SleepSwitch(101, 0))
    touch_and_note()
    awake, asleep, again = sizes
    given = 130e6
    assert awake - asleep > 0.75 * given, sizes
    assert again - awake < 0.25 * given, sizes
    assert generate(pipeline, writer, 1, PROMPT, TOKENS) == before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
