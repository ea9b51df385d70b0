"""Files of the engine's own classes for each mutant of an adapter: they fail with the mutant and pass without it.

`python -m benchmarks.standalone_exports --mutants` runs this. What the release fails by itself is no finding here, and
a shrunk schedule passes on the release, so that the mutant alone makes the file fail.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import pytest

from scripted.core.adapters import adapter_named
from scripted.core.edits import EditDoesNotFit
from scripted.core.installed import harness_packages
from scripted.core.mutant import switched_on
from scripted.sdk import SchedulerAdapter
from scripted.sdk.standalone import Standalone, text_of, why_not_red
from scripted.search.campaign import Campaign
from scripted.search.other_tree import OtherTree, other_tree
from scripted.search.shrinking import shrink
from scripted.search.units import Finding, SearchPlan

if TYPE_CHECKING:
    from scripted.core.schedule import Schedule

NO_FILE: Final = "no file"
_SEARCH_S: Final = 30.0
# Further kinds of failures are worth less time than the first.
_FURTHER_S: Final = 3.0
_SHRINK_S: Final = 4.0
_LIMIT_S: Final = 120.0
# Each shows the mutant by another failure; the first one may have no file.
_MOST_FINDINGS: Final = 4
_PACKAGES: Final = (*sorted(harness_packages()), "engine")


def rows_of(adapter: SchedulerAdapter, names: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each mutant with the reason why its file is not red with it and green without it; None if it is."""
    found = importlib.util.find_spec(adapter.packages[0])
    assert found is not None
    assert found.origin is not None, "the adapter imports it"
    with other_tree(str(Path(found.origin).parents[1]), adapter.name) as release:
        for name in names:
            try:
                yield name, _what_is_wrong(adapter, name, release)
            except EditDoesNotFit:
                yield name, f"{NO_FILE}: it does not fit {adapter.version()}"


def _what_is_wrong(adapter: SchedulerAdapter, name: str, release: OtherTree) -> str | None:
    said: str | None = None
    for number, finding in enumerate(_findings(adapter, name, release)):
        file, why = _file_of(adapter, name, finding, release)
        wrong = f"{NO_FILE}: {why}" if file is None else is_told_apart(file, why, *runs_of(adapter, name))
        if wrong is None:
            return None
        said = wrong if not number or said is None or said.startswith(NO_FILE) else said
    return said or f"{NO_FILE}: no schedule was found that fails with it and passes on the release"


def _findings(adapter: SchedulerAdapter, name: str, release: OtherTree) -> list[Finding]:
    """Return failures of different kinds that the release does not have: of its workloads, else of generated ones."""
    kept: dict[str, Finding] = {}
    started = time.process_time()

    def sort(finding: Finding) -> None:
        signature, schedule = finding.failure.signature, finding.schedule
        if signature not in kept and schedule is not None and release.failure_of(schedule, "") is None:
            kept[signature] = finding

    def is_enough() -> bool:
        return len(kept) >= _MOST_FINDINGS or (bool(kept) and time.process_time() - started > _FURTHER_S)

    for targets in (tuple(adapter.workloads), ()):
        plan = SearchPlan(targets=targets, mutant=name, adapter=adapter.name, cpu_seconds=_SEARCH_S)
        Campaign(plan, sort=sort, is_enough=is_enough).run()
        if kept:
            break
    return list(kept.values())


def _file_of(
    adapter: SchedulerAdapter, name: str, finding: Finding, release: OtherTree
) -> tuple[str | None, str | None]:
    """Return the file of the shrunk finding with its expected failure, or the reason why there is none."""
    standalone, schedule = adapter.standalone, finding.schedule
    assert schedule is not None, "a script is not kept"
    if not isinstance(standalone, Standalone):
        return None, "the adapter writes none"

    def passes_without(candidate: Schedule) -> bool:
        return release.failure_of(candidate, "") is None

    with switched_on(adapter, name):
        small = shrink(schedule, finding.failure.signature, budget_s=_SHRINK_S, keeps=passes_without).schedule
        return text_of(standalone, small, "export")


# -- the page --


def write_rows(page: Path, section: str, rows: Mapping[str, str]) -> None:
    """Put these rows into the table under a heading of the page; rows of other mutants stay."""
    before, head, rest = page.read_text(encoding="utf-8").partition(f"## {section}\n")
    table, next_head, after = rest.partition("\n## ")
    for name, said in rows.items():
        row = f"| `{name}` | {said} |"
        if f"\n| `{name}` |" in table:
            lines = [row if line.startswith(f"| `{name}` |") else line for line in table.split("\n")]
            table = "\n".join(lines)
        else:
            table = f"{table.rstrip()}\n{row}\n"
    page.write_text(before + head + table + next_head + after, encoding="utf-8")


# -- the file with the mutant and without it --

Run = Callable[[Path], tuple[int, str]]


def runs_of(adapter: SchedulerAdapter, name: str) -> tuple[Run, Run]:
    """Return what runs a file with the mutant, and what runs it without."""
    return lambda path: _run(path, adapter, name), lambda path: _run(path, adapter, None)


def is_told_apart(file: str, why: str | None, red: Run, green: Run) -> str | None:
    """Return why a file does not fail as expected in ``red`` and pass in ``green``; None if it does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_standalone.py"
        path.write_text(file, encoding="utf-8")
        if (wrong := why_not_red(*red(path), why)) is not None:
            return f"NOT RED: {wrong}"
        status, said = green(path)
    return None if status == 0 and "1 passed" in said else f"NOT GREEN: {said.strip()[-400:]}"


def _run(path: Path, adapter: SchedulerAdapter, mutant: str | None) -> tuple[int, str]:
    """Run a file in a process of its own, which has imported the engine before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([type(adapter).__module__, "pytest"])
    child = context.Process(target=_run_here, args=(str(path), adapter.name, mutant))
    child.start()
    child.join(_LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    said = path.with_suffix(".txt")
    return child.exitcode or 0, said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""


def _run_here(path: str, adapter: str, mutant: str | None) -> None:
    """Run a file with the mutant on, where nothing of this project can be imported; write its output beside it."""
    with Path(path).with_suffix(".txt").open("wb") as said, switched_on(adapter_named(adapter), mutant):
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        ini = Path(path).with_name("pytest.ini")
        ini.write_text("[pytest]\n", encoding="utf-8")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.modules.update(dict.fromkeys(_PACKAGES, cast("ModuleType", None)))
        words = [path, "-q", "-p", "no:cacheprovider", "-c", str(ini), "--rootdir", str(ini.parent)]
        status = pytest.main(words)
        sys.stdout.flush()
    os._exit(int(status))
