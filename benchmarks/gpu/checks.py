"""Parity on the device: the model's tests and the registered suite in the server tier, by pytest with ``--device``.

The suite has scripts of one stage and of four, which share the GPU if there are fewer than four. Counts pytest's
outcomes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting

__all__ = ["CheckFailed", "check_model", "check_servers"]

_ROOT: Final = Path(__file__).parents[2]
_MODEL: Final = Path("tests/unit/model")
# The tests that take ``--device``; the others concern CPUs or files.
_PARITY: Final = (
    "test_forward_equality.py",
    "test_window_forward.py",
    "test_runner.py",
    "test_sampling.py",
    "test_verification.py",
    "test_prompt_scores.py",
    "test_lora.py",
    "test_cuda_path.py",
    "test_host_pool.py",
)
_SUITE: Final = "tests/registered"
# The tests of a dry run.
_FEW_PARITY: Final = ("test_forward_equality.py", "-k", "llama-1-7 or llama-4-7")
_FEW_SCRIPTS: Final = (f"{_SUITE}/core/test_one_stage.py", f"{_SUITE}/pipeline/test_flush_window.py")
_WORKERS: Final = 4
_TAIL_LINES: Final = 60


class CheckFailed(RuntimeError):
    """Some tests failed, or none ran; the text has the end of pytest's output."""


def check_model(setting: Setting) -> list[Table]:
    """Compare the forward, sampling, LoRAs and drafts with transformers' on the CPU."""
    names = _FEW_PARITY if setting.dry_run else _PARITY
    chosen = [str(_MODEL / name) if name.endswith(".py") else name for name in names]
    return [_table("The model's parity tests", setting, chosen)]


def check_servers(setting: Setting) -> list[Table]:
    """Run every registered script on real servers."""
    chosen = _FEW_SCRIPTS if setting.dry_run else (_SUITE, "-n", str(_WORKERS), "--dist", "loadgroup")
    return [_table("The registered suite, server tier", setting, [*chosen, "--tier", "server"])]


def _table(title: str, setting: Setting, chosen: list[str]) -> Table:
    """Count tests by file and outcome. Raises CheckFailed with the counts if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        account = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--device", setting.device, f"--junitxml={account}", *chosen]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(  # noqa: S603 - our own interpreter and tests
            command,
            cwd=_ROOT,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not account.is_file():
            raise CheckFailed(_tail(done.stdout))
        counts = _counts(account)
    table = Table(title=f"{title}, --device {setting.device}", columns=("file", "passed", "failed", "skipped"))
    for file, outcomes in sorted(counts.items()):
        table.rows.append((file, outcomes["passed"], outcomes["failed"], outcomes["skipped"]))
    failed = sum(outcomes["failed"] for outcomes in counts.values())
    passed = sum(outcomes["passed"] for outcomes in counts.values())
    if failed or not passed or done.returncode:
        raise CheckFailed(
            f"{passed} passed, {failed} failed, pytest ended with {done.returncode}\n{_tail(done.stdout)}"
        )
    table.rows.append(("all", passed, failed, sum(outcomes["skipped"] for outcomes in counts.values())))
    return table


def _counts(account: Path) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for case in ET.parse(account).iter("testcase"):  # noqa: S314 - pytest has just written it
        file = str(case.get("classname", "")).replace(".", "/")
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        counts.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})[outcome] += 1
    return counts


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
