"""Starts that are refused: early, with a sentence, before anything costly is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.process.settings import ServerSettings
from engine.server.launch import resolution
from engine.server.launch.resolution import refuse_early

ROOT = Path(__file__).resolve().parents[3]
START = """
import sys
from engine.server.launch.supervisor import supervise
from engine.process.settings import ServerSettings
wrong = {wrong}
print([supervise(ServerSettings(port=0, log_format="json", **one)) for one in wrong])
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_what_is_wrong_is_refused_before_the_costly_imports() -> None:
    """C06, C09, C11: a misspelled path costs no five seconds. What is said is one line, as JSON where the log is."""
    wrong = [{"model": "/no/such/folder"}, {"model": str(ROOT / "docs")}, {"pp_size": 5}, {"record": "/dev/null/x"}]
    command = [sys.executable, "-c", START.format(wrong=wrong)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == ["[1, 1, 1, 1]", "[]"], done.stderr
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["level"] for one in said] == ["error"] * len(wrong)
    assert "'/no/such/folder', which is not a folder here" in said[0]["message"]


@pytest.mark.parametrize(
    ("files", "visible", "device", "is_there"),
    [
        (1, None, "cuda:1", False),
        (1, None, "cuda:0", True),
        (4, None, "cuda:3", True),
        (4, "2,3", "cuda:2", False),
        (4, "2,3", "cuda:1", True),
        (4, "", "cuda", False),
        (4, "1,-1,2", "cuda:1", False),
        (0, None, "cuda:7", True),
        (0, "GPU-1", "cuda:7", False),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_where_the_machine_tells(
    files: int, visible: str | None, device: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither files nor variable tell how many there are, torch does later."""
    for name in ["nvidiactl", *(f"nvidia{number}" for number in range(files))]:
        (tmp_path / name).touch()
    monkeypatch.setattr(resolution, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(resolution, "_has_gpu_driver", lambda: True)
    monkeypatch.delenv(resolution.VISIBLE_DEVICES, raising=False)
    if visible is not None:
        monkeypatch.setenv(resolution.VISIBLE_DEVICES, visible)
    if is_there:
        refuse_early(ServerSettings(device=device))
    else:
        with pytest.raises(ConfigError, match=f"device must be a GPU .* got '{device}'"):
            refuse_early(ServerSettings(device=device))
