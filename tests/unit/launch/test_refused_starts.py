"""Starts that are refused: early, with a sentence, before anything costly is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.resolution import _has_gpu_driver

ROOT = Path(__file__).resolve().parents[3]
START = """
import sys
from engine.launch.supervisor import supervise
from engine.settings import ServerSettings
status = supervise(ServerSettings(port=0, {arguments}))
print(status, [name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("model='/no/such/folder'", ["'/no/such/folder', which is no folder here"]),
        ("model='embeded'", ["model must be 'embedded'", "got 'embeded'"]),
        (f"model={str(ROOT / 'docs')!r}", ["must hold config.json"]),
        ("pp_size=5", ["pp_size must be <= 4", "got 5"]),
        ("context_length=9000", ["context_length must be <= 8192", "got 9000"]),
        ("device='cuda'", ["device must exist", "no driver for 'cuda'", "--device cpu"]),
    ],
)
def test_wrong_model_is_refused_before_the_costly_imports(arguments: str, parts: list[str]) -> None:
    """C09, C11: a misspelled path costs no five seconds."""
    if "cuda" in arguments and _has_gpu_driver():
        pytest.skip("this machine has a GPU's driver")
    command = [sys.executable, "-c", START.format(arguments=arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "1 []", done.stderr
    assert done.stderr.startswith("error: ")
    assert all(part in done.stderr for part in parts), done.stderr


def test_refusal_is_json_where_the_log_is() -> None:
    """C06: one line, whatever it says."""
    command = [sys.executable, "-c", START.format(arguments="model='/no/such/folder', log_format='json'")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert said["level"] == "error"
    assert "'/no/such/folder', which is no folder here" in said["message"]
