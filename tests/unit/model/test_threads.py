"""The threads of a stage: by the backend, the cores, the stages and the size of the model, or as configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.model.threads import OPENVINO_THREADS, TORCH_THREADS, ThreadRule, stage_threads, usable_cores

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rule", "cores", "stages", "weights", "expected"),
    [
        (OPENVINO_THREADS, 1, 1, 0, 1),
        (OPENVINO_THREADS, 2, 1, 0, 2),
        (OPENVINO_THREADS, 64, 1, 0, 2),
        (OPENVINO_THREADS, 64, 1, 10 * MIB, 3),
        (OPENVINO_THREADS, 64, 1, 1137 * MIB, 64),
        (OPENVINO_THREADS, 2, 4, 1137 * MIB, 1),
        (OPENVINO_THREADS, 16, 4, 0, 4),
        (TORCH_THREADS, 2, 1, 10 * MIB, 1),
        (TORCH_THREADS, 2, 1, 1137 * MIB, 2),
        (TORCH_THREADS, 64, 1, 1137 * MIB, 18),
        (TORCH_THREADS, 2, 4, 1137 * MIB, 1),
        (TORCH_THREADS, 16, 4, 0, 4),
    ],
)
def test_one_stage_takes_the_cores_that_it_has_work_for(
    rule: ThreadRule, cores: int, stages: int, weights: int, expected: int
) -> None:
    assert rule.threads(cores, stages, weights) == expected


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.threads.usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def _threads(folder: Path, **values: object) -> int:
    config = EngineConfig(model=str(folder), backend="openvino", **values)
    return stage_threads(config, Limits.of(config, EMBEDDED_FACTS), OPENVINO_THREADS)


@pytest.mark.usefixtures("four_cores")
def test_what_is_configured_goes_before_the_rule_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8 * MIB))
    assert [_threads(tmp_path), _threads(tmp_path, pp_size=2)] == [3, 2]
    (tmp_path / "model-2.safetensors").write_bytes(bytes(64 * MIB))
    assert _threads(tmp_path) == 4
    for said, expected in (("1", 1), ("16", 4), ("", 4), ("0", 4), ("all", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert _threads(tmp_path) == expected
        assert _threads(tmp_path, threads=7) == 7


@pytest.mark.parametrize(
    ("siblings", "quota", "expected"),
    [
        (None, None, 4),
        (["0-1", "0-1", "2-3", "2-3"], None, 2),
        (["0", "1", "2", "3"], "max 100000", 4),
        (["0", "1", "2", "3"], "250000 100000", 2),
        (["0", "1", "2", "3"], "50000 100000", 1),
        (["0-1", "0-1", "2-3", "2-3"], "800000 100000", 2),
    ],
)
def test_a_core_counts_once_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str] | None, quota: str | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, said in enumerate(siblings or []):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(said + "\n")
    if quota is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path) == expected
