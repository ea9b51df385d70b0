"""Every install line of the pages, run as written in an empty environment, against a copy of what is committed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))

from install_lines import install_lines  # noqa: E402

TIMEOUT_S = 900


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """Run a line of shell in a clone, with an environment of its own; raises where it fails."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    # Before 24.1 pip takes no requirement at a git+file address, which stands for the https address of the pages here.
    subprocess.run([str(folder / "env/bin/pip"), "install", "--quiet", "--upgrade", "pip"], check=True)

    def run(line: str, where: Path | None = None) -> str:
        path = os.pathsep.join([str(folder / "env/bin"), os.environ["PATH"]])
        own = {"PATH": path, "REPOSITORY": (folder / "clone").as_uri(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            line, shell=True, cwd=where or folder / "clone", env=environment | own,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}:\n{done.stdout[-3000:]}"
        return done.stdout

    return run


def test_every_install_line_works(shell, tmp_path: Path) -> None:
    """D: lines with an extra are resolved and not installed: that is what may fail, and torch alone has gigabytes."""
    lines = list(dict.fromkeys(line for _, line in install_lines()))
    for line in sorted(lines, key=lambda line: "[" in line):
        # Not by pip's variable, which the build of the wheel would obey too.
        shell(line.replace("pip install", "pip install --dry-run", 1) if "[" in line else line)
    shell("scripted new flush_meets_abort --dir tests && python -m pytest -q tests --tier sim", tmp_path)
