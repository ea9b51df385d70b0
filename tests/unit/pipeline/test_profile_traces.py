"""Profiles of real stages: a trace a stage, written between two known microbatches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handmade_plans import PlanWriter, generate, run, take
from stage_farm import StageFarm

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import Microbatch, ProfileSwitch
from engine.model import profiling
from engine.model.runner import StageRunner
from engine.pipeline.local import LocalPipeline
from engine.pipeline.staged import StagedPipeline

PROMPT = list(b"What takes the time?")
LIMITS = Limits.of(EngineConfig(), EMBEDDED_FACTS)


def control(trace_dir: Path | None, number: int = 100) -> Microbatch:
    return ProfileSwitch(number, None if trace_dir is None else str(trace_dir))


def events_of(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}


@pytest.fixture(params=[1, 2])
def pipeline(
    request: pytest.FixtureRequest, farm: StageFarm, private_dir: Path
) -> Iterator[LocalPipeline | StagedPipeline]:
    if request.param == 1:
        yield LocalPipeline(StageRunner(EngineConfig(device="cpu"), LIMITS, 0))
        return
    staged = StagedPipeline(private_dir, 2)
    pids = farm.start(EngineConfig(device="cpu", pp_size=2), private_dir)
    yield staged
    staged.close()
    farm.reap(pids)


def test_every_stage_writes_a_trace(pipeline: LocalPipeline | StagedPipeline, tmp_path: Path) -> None:
    """Operators see and do what the routes promise (C06)."""
    writer, folder = PlanWriter(LIMITS), tmp_path / "new" / "traces"
    before = generate(pipeline, writer, 0, PROMPT, 3)
    assert run(pipeline, control(folder)).error is None
    assert generate(pipeline, writer, 1, PROMPT, 3) == before
    assert run(pipeline, control(None)).error is None
    stages = 1 if isinstance(pipeline, LocalPipeline) else 2
    assert sorted(path.name for path in folder.iterdir()) == [f"stage-{stage}.json" for stage in range(stages)]
    assert all("aten::linear" in events_of(path) or "aten::mm" in events_of(path) for path in folder.iterdir())


def test_results_behind_a_profile_come_behind_it(pipeline: LocalPipeline | StagedPipeline, tmp_path: Path) -> None:
    """However long a stage takes to write: completions come in launch order."""
    writer = PlanWriter(LIMITS)
    for microbatch in (writer.plan(0, PROMPT), control(tmp_path), writer.plan(1, PROMPT), control(None, 101)):
        pipeline.launch(microbatch)
    assert [take(pipeline).microbatch_id for _ in range(4)] == [1, 100, 2, 101]


def test_a_folder_that_cannot_be_made_is_an_error(pipeline: LocalPipeline | StagedPipeline, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = str(run(pipeline, control(tmp_path / "file" / "traces")).error)
    assert f"a trace must be written into {tmp_path / 'file' / 'traces'}, but: Not a directory" in error
    assert "another profile_dir" in error
    assert run(pipeline, control(None)).error is None
    assert run(pipeline, PlanWriter(LIMITS).plan(0, PROMPT)).error is None


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _take_the_names(folder: Path) -> None:
    for trace in folder.iterdir():
        trace.unlink()
        (trace / "in the way").mkdir(parents=True)


@pytest.mark.parametrize("damage", [_remove, _take_the_names])
def test_a_trace_that_is_not_written_is_an_error(
    damage: Callable[[Path], None], pipeline: LocalPipeline | StagedPipeline, tmp_path: Path
) -> None:
    """A05: only the call fails; no client gets the path of a missing trace, and the next profile succeeds."""
    writer, folder = PlanWriter(LIMITS), tmp_path / "traces"
    assert run(pipeline, control(folder)).error is None
    run(pipeline, writer.plan(0, PROMPT))
    damage(folder)
    assert "must be complete" in str(run(pipeline, control(None)).error)
    assert run(pipeline, control(tmp_path / "again")).error is None
    assert run(pipeline, writer.plan(1, PROMPT)).error is None
    assert run(pipeline, control(None)).error is None


@pytest.mark.usefixtures("_one_torch_thread")
def test_half_a_trace_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A05: as a full disk leaves it."""
    half = '{"traceEvents": [{"name": "aten::li'
    monkeypatch.setattr(profiling.profile, "export_chrome_trace", lambda _, path: Path(path).write_text(half))
    pipeline = LocalPipeline(StageRunner(EngineConfig(device="cpu"), LIMITS, 0))
    run(pipeline, control(tmp_path))
    assert f"it ends after {len(half)} bytes" in str(run(pipeline, control(None)).error)


@pytest.mark.usefixtures("_one_torch_thread")
def test_a_trace_that_is_not_written_at_the_bound_fails_no_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05: the client that stops the profile gets the error."""
    monkeypatch.setattr(profiling, "PROFILE_LIMIT_STEPS", 1)
    pipeline = LocalPipeline(StageRunner(EngineConfig(device="cpu"), LIMITS, 0))
    run(pipeline, control(tmp_path / "traces"))
    shutil.rmtree(tmp_path / "traces")
    assert run(pipeline, PlanWriter(LIMITS).plan(0, PROMPT)).error is None
    assert "must be complete" in str(run(pipeline, control(None)).error)


@pytest.mark.usefixtures("_one_torch_thread")
def test_a_profile_that_is_never_stopped_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "PROFILE_LIMIT_STEPS", 2)
    pipeline = LocalPipeline(StageRunner(EngineConfig(device="cpu"), LIMITS, 0))
    run(pipeline, control(tmp_path))
    generate(pipeline, PlanWriter(LIMITS), 0, PROMPT, 2)
    written = (tmp_path / "stage-0.json").read_bytes()
    assert written
    generate(pipeline, PlanWriter(LIMITS), 1, PROMPT, 2)
    assert run(pipeline, control(None)).error is None
    assert (tmp_path / "stage-0.json").read_bytes() == written
