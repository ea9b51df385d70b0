"""Runs vLLM's adapter on several releases of vLLM, and reports the workloads that pass and the mutants that fit.

`python -m ci.vllm_versions 0.33.0 0.32.0` fetches the wheel of each version without its requirements and unpacks its
Python files; vLLM's scheduler needs no more. Libraries come from this environment. The exit status is 1 if a workload
fails, or if nothing could be run, on one of the versions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]
_FOLDER: Final = _ROOT / ".venv-vllm" / "versions"
_LIMIT_S: Final = 900
_KEPT: Final = (".py", ".json", "/METADATA", "/RECORD", "/WHEEL", "/entry_points.txt")
# Runs with that vLLM first on the path. A broken workload becomes one line, and the others go on.
_LOOK: Final = """
from scripted_vllm.versions import installed_version
from scripted_vllm.config import VllmSettingsError
from scripted.core.edits import EditDoesNotFit
from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

adapter = adapter_named("vllm")
broken, misfits, lacking = {}, [], []
for name, text in adapter.workloads.items():
    try:
        failure = execute(Schedule.parse(text, of="vllm")).failure
    except Exception as exc:
        failure = exc
        if isinstance(exc.__cause__, VllmSettingsError):
            lacking.append(name)
            continue
    if failure is not None:
        broken.setdefault(f"...{str(failure)[-160:]}", []).append(name)
for name in adapter.mutant_names:
    try:
        with adapter.switched_on(name):
            pass
    except EditDoesNotFit:
        misfits.append(name)
workloads, mutants = len(adapter.workloads), len(adapter.mutant_names)
failing = sum(map(len, broken.values()))
print(f"{installed_version()}: {workloads - failing - len(lacking)} of {workloads} workloads pass, "
      + (f"{len(lacking)} need another version ({', '.join(lacking)}), " if lacking else "")
      + f"{mutants - len(misfits)} of {mutants} mutants fit" + (f"; not {', '.join(misfits)}" if misfits else ""))
for cause, names in broken.items():
    print(f"  {', '.join(names)}: {cause}")
raise SystemExit(bool(broken))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each version; return 0 if all workloads pass on all of them."""
    parser = argparse.ArgumentParser(prog="python -m ci.vllm_versions", description=__doc__)
    parser.add_argument("version", nargs="+", help="of vLLM, as it was released")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where versions are kept (default: %(default)s)")
    asked = parser.parse_args(arguments)
    failed = [version for version in asked.version if not look(version, asked.folder)]
    if failed:
        sys.stdout.write(f"something is broken on {', '.join(failed)}\n")
    return bool(failed)


def look(version: str, folder: Path) -> bool:
    """Return whether all workloads pass on this version; fetch it unless the folder has it."""
    tree = folder / version
    try:
        if not tree.is_dir():
            fetch(version, tree)
        path = os.pathsep.join([str(tree), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(  # noqa: S603 - this Python, and text of ours
            [sys.executable, "-c", _LOOK],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.CalledProcessError as exc:
        sys.stdout.write(f"{version}: cannot be fetched: {_last_line(exc.stderr)}\n")
        return False
    except subprocess.TimeoutExpired:
        sys.stdout.write(f"{version}: not done after {_LIMIT_S} s\n")
        return False
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    said = lines[next((i for i, line in enumerate(lines) if line.startswith(f"{version}:")), len(lines)) :]
    sys.stdout.write(
        "\n".join(said or [f"{version}: the adapter cannot be imported: {_last_line(done.stderr)}"]) + "\n"
    )
    sys.stdout.flush()
    return done.returncode == 0


def fetch(version: str, tree: Path) -> None:
    """Unpack the Python files of a release. Raises CalledProcessError if there is none."""
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run(  # noqa: S603 - pip of this Python
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={wheels}", f"vllm=={version}"],
            check=True,
            capture_output=True,
            text=True,
        )
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [name for name in archive.namelist() if name.endswith(_KEPT)])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main())
