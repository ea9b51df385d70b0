"""The benchmark for GPUs without one: its parts over a tiny model, failures that stay in their part, its report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.checkpoints import make_checkpoint
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.decode import kind_of
from benchmarks.gpu.device import read_bytes
from benchmarks.gpu.results import PartResult, Report, Status, Table, as_markdown, read_report, write_report
from benchmarks.gpu.setting import Setting

MACHINE = {"GPU": "a GPU", "torch": "2"}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "bfloat16", "S")
    small = Setting.small()
    return msgspec.structs.replace(small, checkpoint=str(folder), batches=(3,), new_tokens=4, rounds=1)


def run_here(names: list[str], setting: Setting, folder: Path) -> list[PartResult]:
    """The parts in this process, as the process of a dry run computes them."""
    given = folder / "setting.json"
    given.write_bytes(msgspec.json.encode(setting))
    gpu.be_parts(names, given)
    return [msgspec.json.decode(gpu._result_of(folder, name).read_bytes(), type=PartResult) for name in names]


def test_a_dry_run_takes_the_paths_of_a_gpu_and_names_what_it_lacks(setting: Setting, tmp_path: Path) -> None:
    decode, graphs = run_here(["decode", "graphs"], setting, tmp_path)
    assert (decode.error, graphs.error) == ("", "")
    parts, device, share = decode.tables
    assert parts.rows[0][0] == 3
    assert all(isinstance(cell, float) for cell in parts.rows[0][1:])
    assert (device.needs, set(device.rows[0][1:])) == ("CUDA", {None})
    assert share.rows[0][-1] is None
    # Batches of three are padded to the largest of the graphs; they say what they say without.
    assert graphs.tables[1].rows == [(3, 100.0)]


def test_a_part_that_fails_is_a_result_and_the_next_one_goes_on(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.PARTS, "broken", gpu.Part("device:no_such_thing", 1, True, "nothing"))
    broken, device = run_here(["broken", "device"], setting, tmp_path)
    assert (broken.status, device.status) == (Status.FAILED, Status.DONE)
    assert "no_such_thing" in broken.error
    taken = device.tables[1]
    assert (taken.needs, [row[0] for row in taken.rows]) == ("CUDA", [16, 32, 64, 128, 256])


def test_a_part_without_time_is_ended(setting: Setting, tmp_path: Path) -> None:
    (result,) = gpu.run_parts(["device"], setting, tmp_path, 0.05)
    assert result.status is Status.OUT_OF_TIME
    assert "ended with status -" in result.error


def test_parts_that_compute_share_the_process_of_a_dry_run_alone() -> None:
    names = ["suite", "device", "decode"]
    assert gpu.groups(names, together=True) == [["device", "decode"], ["suite"]]
    assert gpu.groups(names, together=False) == [["suite"], ["device"], ["decode"]]


def test_a_report_is_added_to_on_the_same_machine_only(tmp_path: Path) -> None:
    table = Table(title="t", columns=("a", "b"), rows=[("x", 1234.5), ("y", None)], needs="CUDA")
    report = Report(machine=MACHINE, dry_run=False)
    report.parts["decode"] = PartResult(name="decode", status=Status.DONE, seconds=2.0, tables=[table])
    numbers, page = write_report(report, tmp_path)
    assert as_markdown(read_report(numbers, MACHINE, dry_run=False)) == as_markdown(report) == page.read_text()
    assert "| x | 1,234 |\n| y |  |\n\nEmpty cells need CUDA." in page.read_text()
    assert read_report(numbers, {**MACHINE, "torch": "3"}, dry_run=False).parts == {}
    assert read_report(numbers, MACHINE, dry_run=True).parts == {}


def test_what_a_step_must_read_is_counted_once(setting: Setting) -> None:
    """S: 4.2 million weights in the layers and the head; the embedding is looked up. KV of 4 layers, 2 heads of 64."""
    weights, kv = read_bytes(setting)
    assert weights == pytest.approx(2 * 4.2e6, rel=0.01)
    assert kv == 2 * 4 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copies to the device"),
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("nvjet_tst_64x8_64x16_1x4_h_bz_TNT", "matrix products"),
        ("void at::native::vectorized_elementwise_kernel<...>", "other kernels"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.gpu.device.shutil.which", lambda name: None)
    assert gpu.main([]) == gpu.NO_GPU
    assert "--dry-run" in capsys.readouterr().err
