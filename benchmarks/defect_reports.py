"""Runs the scripts of docs/reports: red on the installed release, green with the fix that the report proposes.

`python -m benchmarks.defect_reports --adapter vllm --python PYTHON` runs each report of that engine with that Python,
where nothing of this project can be imported, and prints one row for each. ``--source FOLDER`` has the package of
another release, which runs instead of the installed one. A report of other releases is skipped by name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from lockstep.interruption import interruptible

_ROOT: Final = Path(__file__).resolve().parents[1]
_REPORTS: Final = _ROOT / "docs" / "reports"
_ADAPTERS: Final = ("vllm", "sglang", "transformers")
_LIMIT_S: Final = 300
SKIPPED: Final = "skipped"
# Where a project keeps its package.
_SOURCES: Final = ("python/", "src/")
# Imports each fixed module from its new text. Removes the shared memory that the script's own process made and left.
_RUN: Final = """
import importlib.util, json, os, runpy, sys
files = json.loads(sys.argv[2])
made = []
def note(event, given):
    if event == "open" and str(given[0]).startswith("/dev/shm/") and not os.path.exists(given[0]):
        made.append(given[0])
sys.addaudithook(note)
class Mended:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, files[name]) if name in files else None
sys.meta_path.insert(0, Mended)
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    for file in filter(os.path.exists, made):
        os.remove(file)
"""
# With these an engine that was built for another device takes the CPU.
_ENVIRONMENT: Final = {"VLLM_TARGET_DEVICE": "cpu", "SGLANG_USE_CPU_ENGINE": "1"}


# The releases that a report names, first the one that its fix is for.
_VERSIONS: Final = re.compile(r"^(?:vLLM|SGLang|transformers) (\d[\d.]*\d)(?: \(also ([^)]*)\))?", re.MULTILINE)


# Prints a package's release; a distribution may have another name than its package.
_VERSION: Final = """
import importlib.metadata as known, sys
try:
    print(known.version(sys.argv[1]))
except known.PackageNotFoundError:
    print(known.version(known.packages_distributions()[sys.argv[1]][0]))
"""


class Report(msgspec.Struct, frozen=True):
    """A page of docs/reports: its releases, its script, its output, and the proposed fix as hunks by file."""

    name: str
    versions: tuple[str, ...]
    script: str
    printed: str
    hunks: Mapping[str, Sequence[tuple[str, str]]]


def read_report(page: Path) -> Report:
    """Read a page. Raises ValueError for one without a release, a script, its output or a fix."""
    text = page.read_text(encoding="utf-8")
    if (named := _VERSIONS.search(text)) is None:
        raise ValueError(f"{page} names no release; a report says with which ones its script fails")
    versions = (named[1], *re.findall(r"\d[\d.]*\d", named[2] or ""))
    blocks = dict(re.findall(r"^```(python|text|diff)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[::-1])
    missing = [kind for kind in ("python", "text", "diff") if kind not in blocks]
    if missing:
        raise ValueError(
            f"{page} has no block of {' and '.join(missing)}; a report has a script, its output and a suggested fix"
        )
    return Report(
        page.stem, versions, blocks["python"], blocks["text"].strip().splitlines()[-1], _hunks_of(blocks["diff"])
    )


def _hunks_of(diff: str) -> dict[str, list[tuple[str, str]]]:
    """Return the old and the new text of each hunk, by the path of its file in the package."""
    hunks: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        path, _, rest = part.partition("\n")
        for source in _SOURCES:
            path = path.removeprefix(source)
        bodies = [body.splitlines()[1:] for body in re.split(r"^@@", rest, flags=re.MULTILINE)[1:]]
        hunks[path] = [(_side(body, "+"), _side(body, "-")) for body in bodies]
    return hunks


def _side(body: Sequence[str], other: str) -> str:
    """Return a hunk's text without the lines of the other side."""
    return "\n".join(line[1:] for line in body if line[:1] != other)


def mended(report: Report, python: str, folder: Path, source: Path | None = None) -> dict[str, str]:
    """Write the fixed modules of the engine in ``source``, or of the installed one; return their files by module.

    Raises ValueError for a fix that does not fit that engine.
    """
    files = {}
    for number, (path, hunks) in enumerate(report.hunks.items()):
        package, name = path.partition("/")[0], path.removesuffix(".py").replace("/", ".")
        code = f"import importlib.util; print(importlib.util.find_spec({package!r}).origin)"
        origin = Path(_output([python, "-c", code], folder, source)[1].split()[-1])
        text = (origin.parents[1] / path).read_text(encoding="utf-8")
        for old, new in hunks:
            if text.count(old) != 1:
                raise ValueError(f"NOT GREEN: the fix fits {path} {text.count(old)} times; it must fit once")
            text = text.replace(old, new)
        files[name] = str(folder / f"mended_{number}.py")
        Path(files[name]).write_text(text, encoding="utf-8")
    return files


def _output(command: Sequence[str], folder: Path | None = None, source: Path | None = None) -> tuple[int, str]:
    """Return a command's exit status and output; -1 for one that does not end in time.

    Its modules are those of ``source`` and the installed ones, in the processes that it starts too: vLLM looks at a
    model in another process, and keeps what it sees for later runs of the same release.
    """
    environment = _ENVIRONMENT | os.environ
    environment.pop("PYTHONPATH", None)
    if source is not None:
        environment["PYTHONPATH"] = str(source.resolve())
    try:
        done = subprocess.run(  # noqa: S603 - files that we wrote
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {_LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def row_of(report: Report, python: str, version: str, source: Path | None = None, prepare: str = "") -> str:
    """Run a report's script without and with its fix; skip the report of other releases than ``version``.

    ``source`` has the engine's package, if it is not the installed one; ``prepare`` makes its imports possible.
    """
    lines = len(report.script.splitlines())
    mend = sum(
        max(len(old.splitlines()), len(new.splitlines())) for hunks in report.hunks.values() for old, new in hunks
    )
    if version not in report.versions:
        return f"| {report.name} | {lines} | {mend} | {SKIPPED}: of {' and '.join(report.versions)}, not {version} |"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(report.script, encoding="utf-8")
        command = [python, "-c", f"{prepare}\n{_RUN}", str(script)]
        red, said = _output([*command, "{}"], folder, source)
        words = "red" if red == 1 and report.printed in said else f"NOT RED ({red}): {said.strip()[-400:]}"
        try:
            files = mended(report, python, folder, source)
        except ValueError as exc:
            words += f", {exc}" if version == report.versions[0] else f", the fix is for {report.versions[0]}"
        else:
            green, after = _output([*command, json.dumps(files)], folder, source)
            words += ", green with the fix" if green == 0 else f", NOT GREEN ({green}): {after.strip()[-400:]}"
    return f"| {report.name} | {lines} | {mend} | {words} |"


def version_of(package: str, python: str, source: Path | None = None) -> str:
    """Return the release of the package in ``source``, or of the installed one, without a part such as ``+cpu``.

    Raises ValueError if it finds none.
    """
    status, said = _output([python, "-c", _VERSION, package], source=source)
    if status:
        raise ValueError(f"{python} finds no package {package}: {said.strip()[-200:]}")
    return said.split()[-1].partition("+")[0]


def _prepared(name: str) -> str:
    """Return the statements that make the imports of an adapter's engine possible, without importing the engine."""
    stubs = _ROOT / "adapters" / f"scripted_{name}" / "stubs.py"
    return str(runpy.run_path(str(stubs))["PREPARE"]) if stubs.exists() else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all reports of an engine; the exit status is 1 if one is not red and then green, or if none ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defect_reports", description=__doc__)
    parser.add_argument("--adapter", choices=_ADAPTERS, required=True, help="the adapter whose reports to run")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the scripts (default: this one)")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="a folder with the package of another release")
    parser.add_argument("--only", default="", help="run only the report of this name")
    asked = parser.parse_args(arguments)
    prepare = _prepared(asked.adapter)
    version = version_of(asked.adapter, asked.python, asked.source)
    rows = []
    for page in sorted(_REPORTS.glob(f"{asked.adapter}-{asked.only.removeprefix(f'{asked.adapter}-')}*.md")):
        rows.append(row_of(read_report(page), asked.python, version, asked.source, prepare))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    ran = [row for row in rows if f"| {SKIPPED}: " not in row]
    if not ran:
        sys.stdout.write(f"no report of {asked.adapter} {version} ran\n")
    return int(not ran or any("NOT" in row for row in ran))


if __name__ == "__main__":
    with interruptible("benchmarks.defect_reports"):
        sys.exit(main())
