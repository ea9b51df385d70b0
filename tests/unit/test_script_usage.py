"""The scripts of examples, tests and ci answer ``--help`` with their usage, and refuse what they do not know."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from every_case import every_case

# The scripts of ci handle SIGTERM.
pytestmark = pytest.mark.usefixtures("restores_signal_handlers")
ROOT = Path(__file__).parents[2]
FOLDERS = ("examples", "tests/browser", "tests/clients", "tests/load", "ci")
# Its flags are vLLM's, so it cannot name them without vLLM.
NEEDS_ITS_ENGINE = {"vllm_bench.py"}
SCRIPTS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name not in NEEDS_ITS_ENGINE
    and (path.name.startswith("check_") or '\nif __name__ == "__main__":' in path.read_text())
]
NEED_ARGUMENTS = [path for path in SCRIPTS if path.name.startswith(("check_", "agent", "vllm_versions"))]


@every_case("script", SCRIPTS)
def test_help_is_usage(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert _ended(script, monkeypatch, flag) == 0
        assert "usage:" in capsys.readouterr().out.lower()


@every_case("script", SCRIPTS)
def test_an_unknown_flag_is_refused_with_usage(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(script, monkeypatch, "--nonsense") == 2
    assert "usage:" in capsys.readouterr().err.lower()


@every_case("script", NEED_ARGUMENTS)
def test_a_missing_argument_is_named_with_usage(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _ended(script, monkeypatch) == 2
    assert "the following arguments are required" in capsys.readouterr().err


def _ended(script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", [str(script.parent), *sys.path])
        patched.setattr(sys, "argv", [str(script), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    return ended.value.code
