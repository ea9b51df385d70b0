"""`python -m benchmarks.defect_reports` runs each report with the release that it is about.

Goal: a report that fails is told from one of another release. Method: a package of one line in a folder, and reports of
it. Origin: a fix for a newer release ended the command where an older one was installed. Mutant: run every report.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import defect_reports
from benchmarks.defect_reports import main, mended, read_report, row_of, version_of

SCRIPT = "from vllm.sizes import SIZE\nassert SIZE == 2, f'size {SIZE}'"
PAGE = """
# [Bug]: a size

vLLM 0.33.0 (also 0.32.0 and 0.31.0), Linux.

```python
{script}
```

```text
AssertionError: size 1
```

```diff
--- a/vllm/sizes.py
+++ b/vllm/sizes.py
@@ size
-SIZE = {size}
+SIZE = 2
```
"""


def _report(folder: Path, *, script: str = SCRIPT, size: int = 1) -> Path:
    page = folder / "vllm-size.md"
    page.write_text(PAGE.format(script=script, size=size))
    return page


def _release(folder: Path, version: str) -> Path:
    """Write a package of this release; return the folder."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "sizes.py").write_text("SIZE = 1\n")
    (folder / f"vllm-{version}.dist-info").mkdir()
    (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}+cpu\n")
    return folder


def test_a_report_names_its_releases(tmp_path: Path) -> None:
    assert read_report(_report(tmp_path)).versions == ("0.33.0", "0.32.0", "0.31.0")
    for page in Path("docs/reports").glob("*-*.md"):
        assert read_report(page).versions, page


def test_the_release_is_that_of_the_folder(tmp_path: Path) -> None:
    assert version_of("vllm", sys.executable, _release(tmp_path, "0.33.0")) == "0.33.0"
    with pytest.raises(ValueError, match="finds no package no_such_engine"):
        version_of("no_such_engine", sys.executable)


@pytest.mark.parametrize(
    ("version", "script", "size", "words"),
    [
        ("0.33.0", SCRIPT, 1, "red, green with the fix"),
        ("0.33.0", SCRIPT, 3, "red, NOT GREEN: the fix fits vllm/sizes.py 0 times"),
        ("0.32.0", SCRIPT, 3, "red, the fix is for 0.33.0"),
        ("0.32.0", "import vllm", 1, "NOT RED (0): , green with the fix"),
        ("0.30.0", SCRIPT, 1, "skipped: of 0.33.0 and 0.32.0 and 0.31.0, not 0.30.0"),
    ],
)
def test_a_row_says_how_a_report_ends(tmp_path: Path, version: str, script: str, size: int, words: str) -> None:
    source = _release(tmp_path, version)
    row = row_of(read_report(_report(tmp_path, script=script, size=size)), sys.executable, version, source)
    assert f"| {words}" in row


def test_a_script_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM package of another device is red for the report's reason, not because it finds no device."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    script = f"import os\nassert os.environ['VLLM_TARGET_DEVICE'] == 'cpu', 'no device'\n{SCRIPT}"
    report = read_report(_report(tmp_path, script=script))
    assert "| red, green with the fix |" in row_of(report, sys.executable, "0.33.0", _release(tmp_path, "0.33.0"))


def test_a_process_of_a_script_has_the_folders_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another release vLLM's look at a model in a process of its own failed, and was repeated in each run."""
    monkeypatch.setenv("PYTHONPATH", str(Path(defect_reports.__file__).parents[1]))
    child = "import importlib.util as of, vllm.sizes; assert of.find_spec('benchmarks') is None"
    script = f'import subprocess, sys\nsubprocess.run([sys.executable, "-c", "{child}"], check=True)\n{SCRIPT}'
    report = read_report(_report(tmp_path, script=script))
    assert "| red, green with the fix |" in row_of(report, sys.executable, "0.33.0", _release(tmp_path, "0.33.0"))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder of shared memory here")
def test_the_shared_memory_of_a_script_is_removed(tmp_path: Path) -> None:
    """Other processes make files of such names too, so only those that the script itself made may go."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as before:
        left = Path(f"{before.name}_left")
        script = f"open({str(left)!r}, 'w').close()\nopen({before.name!r}, 'w').close()\n{SCRIPT}"
        report = read_report(_report(tmp_path, script=script))
        row = row_of(report, sys.executable, "0.33.0", _release(tmp_path, "0.33.0"))
        assert "| red, green with the fix |" in row
        assert Path(before.name).exists()
        assert not left.exists()


def test_the_fix_is_made_in_the_folders_package(tmp_path: Path) -> None:
    source = _release(tmp_path, "0.33.0")
    files = mended(read_report(_report(tmp_path)), sys.executable, tmp_path, source)
    assert Path(files["vllm.sizes"]).read_text() == "SIZE = 2\n"


@pytest.mark.parametrize(("version", "status", "said"), [("0.32.0", 0, "red, green"), ("0.30.0", 1, "no report of")])
def test_a_command_that_ran_nothing_is_red(
    tmp_path: Path,
    version: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    _report(reports)
    _release(tmp_path, version)
    monkeypatch.setattr(defect_reports, "_REPORTS", reports)
    monkeypatch.setattr(defect_reports, "_prepared", lambda _: "")
    assert main(["--adapter", "vllm", "--source", str(tmp_path)]) == status
    assert said in capsys.readouterr().out
