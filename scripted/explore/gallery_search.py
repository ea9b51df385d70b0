"""How soon the search finds each mutant of the gallery, unaided: it is told neither the window nor the workload.

The README's table of the gallery is made from this.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from scripted.explore.campaign import Campaign
from scripted.explore.units import Finding, SearchPlan
from scripted.explore.workloads import WORKLOADS
from scripted.gallery import MUTANTS, Mutant, mutant_named
from scripted.script.loader import find_test

__all__ = ["Found", "find_mutant", "gallery_markdown", "write_gallery"]

_HEAD = "| mutant | origin | the bug | the test that catches it | tiers | found by the search |"


class Found(msgspec.Struct, frozen=True):
    """One search for one mutant; ``finding`` None means that the whole sweep passed with it."""

    mutant: str
    finding: Finding | None
    schedules: int
    cpu_s: float


def find_mutant(name: str) -> Found:
    """Sweep the base workloads with a mutant on, from a cold start, up to the first failure. Raises UnknownMutant."""
    mutant_named(name)
    started = time.process_time()
    report = Campaign(SearchPlan(targets=tuple(WORKLOADS), mutant=name, stop_at_first=True)).run()
    finding = next(iter(report.findings.values()), None)
    return Found(name, finding, report.schedules, time.process_time() - started)


def gallery_markdown(found: Iterable[Found]) -> str:
    """The gallery as a Markdown table: origin, the bug, the test that catches it and where, what finding it took."""
    by_name = {one.mutant: one for one in found}
    rows = [_HEAD, "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*rows, *(_row(mutant, by_name.get(mutant.name)) for mutant in MUTANTS)]) + "\n"


def write_gallery(page: Path, found: Iterable[Found]) -> None:
    """Put the table into a page; what stands above one that is there already stays."""
    above = page.read_text(encoding="utf-8").partition(_HEAD)[0] if page.exists() else ""
    page.write_text(above + gallery_markdown(found), encoding="utf-8")


def _row(mutant: Mutant, found: Found | None) -> str:
    if found is None:
        result = "not searched"
    elif found.finding is None:
        result = f"not by a sweep ({found.schedules} schedules)"
    else:
        result = f"schedule {found.schedules}, {found.cpu_s:.2f} s"
    test = mutant.test.rpartition("/")[2].partition("::")[0]
    tiers = ", ".join(find_test(mutant.test).tiers)
    return f"| {mutant.name} | {mutant.origin} | {mutant.bug} | `{test}` | {tiers} | {result} |"
