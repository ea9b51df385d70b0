"""Counts defects of benchmarks/tables/defects.md that can be exported as files of the engine's classes and run alone.

`python -m benchmarks.standalone_exports --adapter vllm` runs each file and the engine's examples where nothing of this
project can be imported. With ``--mended FOLDER``, another release, the files of the defects that it has mended must
fail with the installed one and pass with it; with ``--mutants`` a file for each mutant must fail with it and pass
without.
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from scripted.sdk.standalone import Standalone

_ROOT: Final = Path(__file__).resolve().parents[1]
_PAGE: Final = _ROOT / "benchmarks" / "tables" / "defects.md"
_SECTIONS: Final = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
# A schedule begins with its settings, or at once with its first step.
_SCHEDULE: Final = re.compile(r"[^`']*\b\d+ start \w+ prompt=[^`']*")
_LIMIT_S: Final = 300


def schedules_on(page: str, adapter: str) -> list[str]:
    """Return the schedules of an adapter's section with the adapter, in order, each once."""
    part = re.search(rf"^## {_SECTIONS[adapter]}.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    text = "" if part is None else part[0]
    fenced = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    spans = [one for block in fenced for one in re.findall(r"'(adapter=[^']+)'", block)]
    for block in fenced:
        text = text.replace(block, "")
    texts = [" ".join(one.split()) for one in [*spans, *re.findall(r"`([^`]+)`", text)]]
    found = [text for text in texts if _SCHEDULE.fullmatch(text) and not text.startswith("scripted ")]
    # A schedule that begins with its first step has default settings.
    settings = [f"adapter={adapter};" if text[0].isdigit() else f"adapter={adapter}" for text in found]
    named = [text if text.startswith("adapter=") else f"{of} {text}" for of, text in zip(settings, found, strict=True)]
    return list(dict.fromkeys(named))


def count_mended(adapter: Any, python: str, other: Path) -> int:
    """Print how each file of a defect that the other release lacks ends on both; 1 if one is wrong."""
    from scripted.core.defects import defects_of, is_of

    wrong = 0
    for defect in defects_of(adapter.name):
        if adapter.version() not in defect.versions or other.name in defect.versions:
            continue
        for text in (one for one in defect.schedules if is_of(one, adapter.name)):
            said = _red_then_green(adapter.standalone, text, python, other)
            wrong += said is not None and not said.startswith("no file")
            sys.stdout.write(f"| {defect.id} | {said or f'red, green with {other.name}'} |\n")
            sys.stdout.flush()
    return int(wrong > 0)


def _red_then_green(standalone: Standalone, schedule: str, python: str, other: Path) -> str | None:
    """Return why a schedule's file is not red with the installed release and green with the other; None if it is."""
    from benchmarks.mutant_exports import NO_FILE, is_told_apart
    from scripted.core.schedule import Schedule
    from scripted.sdk.standalone import run_alone, text_of

    file, why = text_of(standalone, Schedule.parse(schedule), "export")
    first = f"import sys; sys.path.insert(0, {str(other.resolve())!r})"
    red, green = (
        functools.partial(run_alone, python=python, prepare=f"{one}\n{standalone.prepare}") for one in ("", first)
    )
    return f"{NO_FILE}: {why}" if file is None else is_told_apart(file, why, red, green)


def count_mutants(adapter: Any, names: Collection[str], page: Path | None = None) -> int:
    """Print how each mutant's file ends with and without it; 1 if one is wrong, but not if there is none.

    Each row is also put into ``page``.
    """
    from benchmarks.mutant_exports import NO_FILE, rows_of, write_rows

    wrong = right = 0
    for name, said in rows_of(adapter, [one for one in adapter.mutant_names if one in names or not names]):
        right, wrong = right + (said is None), wrong + (said is not None and not said.startswith(NO_FILE))
        row = " ".join((said or "red, green without it").split()).replace("|", "\\|")
        sys.stdout.write(f"| {name} | {row} |\n")
        sys.stdout.flush()
        if page is not None:
            write_rows(page, _SECTIONS[adapter.name], {name: row})
    sys.stdout.write(f"| {right} of {right + wrong} are red with the mutant and green without |\n")
    return int(wrong > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export each, run each, count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standalone_exports", description=__doc__)
    parser.add_argument(
        "--adapter", choices=tuple(_SECTIONS), required=True, help="the adapter whose defects to export"
    )
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the files (default: this one)")
    parser.add_argument("--mended", type=Path, metavar="FOLDER", help="another release, named by its version")
    parser.add_argument(
        "--mutants", nargs="*", metavar="NAME", help="these mutants of the adapter; all if none is named"
    )
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="the page whose table gets each mutant's row")
    asked = parser.parse_args(arguments)
    from scripted.core.adapters import adapter_named
    from scripted.core.schedule import Schedule
    from scripted.sdk.standalone import run_alone, text_of, what_is_wrong
    from scripted.search.execution import execute

    if asked.mended is not None:
        return count_mended(adapter_named(asked.adapter), asked.python, asked.mended)
    if asked.mutants is not None:
        return count_mutants(adapter_named(asked.adapter), asked.mutants, asked.markdown)
    standalone = getattr(adapter_named(asked.adapter), "standalone", None)
    failing = ran = 0
    texts = schedules_on(_PAGE.read_text(encoding="utf-8"), asked.adapter)
    for text in texts:
        schedule = Schedule.parse(text)
        if execute(schedule).failure is None:
            sys.stdout.write(f"passes here: {text}\n")
            continue
        failing += 1
        why: str | None = "the adapter writes none"
        if standalone is not None:
            file, why = text_of(standalone, schedule, "export")
            why = why if file is None else what_is_wrong(file, why, asked.python, prepare=standalone.prepare)
        ran += why is None
        if why is not None:
            sys.stdout.write(f"no file: {text}: {why}\n")
    folder = _ROOT / "examples" / asked.adapter
    works = shown = 0
    for example in sorted(folder.glob("*.py")):
        if example.name.startswith("test_"):
            prepare = "" if standalone is None else standalone.prepare
            failed, tests = _failed(run_alone(example, asked.python, prepare=prepare)[1])
        elif "__main__" in example.read_text(encoding="utf-8"):
            failed, tests = int(_shows(asked.python, example)), 1
        else:
            continue
        works, shown = works + failed, shown + tests
    sys.stdout.write(
        f"| {asked.adapter} | {len(texts)} schedules | {failing} fail here | {ran} exported and run | "
        f"{works} of {shown} examples |\n"
    )
    return 0


def _failed(said: str) -> tuple[int, int]:
    """Return how many tests failed, as a defect's test must, and how many there are."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (failed|passed|error)", said)}
    if set(counts) != {"failed"}:
        sys.stdout.write(said[-300:])
    return counts.get("failed", 0), sum(counts.values())


def _shows(python: str, example: Path) -> bool:
    """Whether it fails with the defect's text without this project on the path."""
    done = subprocess.run(  # noqa: S603 - a file that we wrote
        [python, "-I", str(example)], cwd=example.parent, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    # A file that cannot even start ends with the same status.
    shows = done.returncode == 1 and "Traceback" not in done.stderr
    if not shows:
        sys.stdout.write(f"{example.name}: {(done.stdout + done.stderr).strip()[-300:]}\n")
    return shows


if __name__ == "__main__":
    sys.exit(main())
