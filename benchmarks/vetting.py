"""The accuracy of ``scripted vet`` on right and on silent scripts: ``python -m benchmarks.vetting``.

The scripts are in ``vetting.toml``. A right script is accused if vet does not call it a test. A silent script is
noticed if vet does not call it a test, or has a remark on it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from lockstep.interruption import interruptible
from scripted.cli.single_run import parametrized
from scripted.core.refusals import ScriptDefinitionError
from scripted.script.loader import find_test, specs_in
from scripted.script.scripted_test import ScriptedTest
from scripted.script.vetting import Vetting

__all__ = ["main", "page_of", "sources"]

_SCRIPTS: Final = Path(__file__).with_name("vetting.toml")
_PAGE: Final = Path(__file__).parent / "tables" / "vetting.md"
# The text before the name of a script's file in a remark.
_FOLDER: Final = re.compile(r"[^\s']*/(?=test_script\.py)")
_COLUMNS: Final = 100
_REFUSED: Final = "refused where it is decorated"
_MOST_CHARACTERS: Final = 110


def sources(kind: str) -> dict[str, str]:
    """Return the files of the ``right`` or the ``silent`` scripts, by script name."""
    scripts = tomllib.loads(_SCRIPTS.read_text(encoding="utf-8"))
    begin = "\n\n" if kind == "right" else scripts["begin"]
    return {name: scripts["head"] + begin + body for name, body in scripts[kind].items()}


def verdict_on(source: str, folder: Path) -> tuple[bool, tuple[str, ...]]:
    """Vet the script in this source; return whether it is a test, and the remarks on it."""
    folder.mkdir()
    path = folder / "test_script.py"
    path.write_text(source, encoding="utf-8")
    try:
        (test,) = [find_test(one) for one in specs_in(str(path))]
    except ScriptDefinitionError as exc:
        return False, (f"{_REFUSED}: {exc}",)
    # In sequential runs a verdict would depend on earlier ones.
    findings = Vetting(is_brief=True).findings(test, path.name, _first_of_each(test))
    return findings.is_a_test, tuple(findings.remarks())


def _first_of_each(test: ScriptedTest) -> dict[str, object]:
    return {name: values[0] for name, values in parametrized(test).items()}


def page_of(
    right: Mapping[str, tuple[bool, tuple[str, ...]]], silent: Mapping[str, tuple[bool, tuple[str, ...]]]
) -> str:
    """Format the page from the verdicts on both kinds of scripts."""
    accused = [name for name, (is_a_test, _) in right.items() if not is_a_test]
    unnoticed = [name for name, (is_a_test, remarks) in silent.items() if is_a_test and not remarks]
    about = (
        f"What `scripted vet` says of {len(right)} right scripts and {len(silent)} silent ones, which test nothing or "
        f"not what they seem to. {len(accused)} right scripts are not called tests; {len(unnoticed)} silent scripts "
        "are called tests without a remark. `python -m benchmarks.vetting` makes this page from `vetting.toml`."
    )
    rows = [*_rows("right", right), *_rows("silent", silent)]
    lines = ["# Vetting", "", *textwrap.wrap(about, _COLUMNS), "", "| kind | script | a test | remark |"]
    return "\n".join([*lines, "| --- | --- | --- | --- |", *rows]) + "\n"


def _rows(kind: str, verdicts: Mapping[str, tuple[bool, tuple[str, ...]]]) -> Iterator[str]:
    for name, (is_a_test, remarks) in verdicts.items():
        remark = _FOLDER.sub("", "; ".join(remarks))
        remark = textwrap.shorten(remark, _MOST_CHARACTERS, placeholder=" ...").replace("|", "\\|")
        yield f"| {kind} | {name} | {'yes' if is_a_test else 'no'} | {remark} |"


def main() -> None:
    """Vet all scripts and write the page. The exit status is 1 if a right script is accused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vetting", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help="some scripts; then no page is written")
    names = parser.parse_args().names
    found: dict[str, dict[str, tuple[bool, tuple[str, ...]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("right", "silent"):
            found[kind] = {}
            for number, (name, source) in enumerate(sources(kind).items()):
                if names and name not in names:
                    continue
                found[kind][name] = verdict_on(source, Path(folder) / f"{kind}_{number}")
                print(*_rows(kind, {name: found[kind][name]}), flush=True)  # noqa: T201
    if not names:
        _PAGE.write_text(page_of(found["right"], found["silent"]), encoding="utf-8")
    sys.exit(not all(is_a_test for is_a_test, _ in found["right"].values()))


if __name__ == "__main__":
    with interruptible("benchmarks.vetting"):
        main()
