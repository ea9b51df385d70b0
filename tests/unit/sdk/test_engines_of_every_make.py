"""The engines of ``examples/engines``: the healthy ones pass, and the search finds each planted bug at once."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from thinned import thinned

from benchmarks.engine_makes import MAKES, found
from scripted.core.adapters import adapter_named
from scripted.core.mutant import mutant_names_of
from scripted.search.campaign import Campaign
from scripted.search.units import SearchPlan

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples/engines"
PLANTED = [(stem, mutant) for stem in MAKES for mutant in mutant_names_of(adapter_named(str(FOLDER / f"{stem}.py")))]
# The worst of them takes 71.
AT_ONCE = 120


def test_every_engine_of_the_folder_is_in_the_table() -> None:
    adapters = {path.stem for path in FOLDER.glob("*.py") if "\nADAPTER = " in path.read_text(encoding="utf-8")}
    assert adapters == set(MAKES)


def test_the_code_of_the_page_is_that_of_the_examples() -> None:
    page = (ROOT / "docs/engine_makes.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    # The action is one that none of the examples has.
    assert [block for block in blocks if block not in code and not block.startswith("class FailLoad")] == []


@pytest.mark.parametrize("stem", thinned(MAKES, one_in=3))
def test_a_healthy_engine_passes_and_leaves_no_thread(stem: str) -> None:
    before = threading.active_count()
    name = str(FOLDER / f"{stem}.py")
    workloads = Campaign(SearchPlan(targets=("aborted", "many"), schedules=12, adapter=name)).run()
    generated = Campaign(SearchPlan(schedules=8, adapter=name)).run()
    assert not workloads.findings, workloads.findings
    assert not generated.findings, generated.findings
    assert threading.active_count() == before


@pytest.mark.parametrize(("stem", "mutant"), thinned(PLANTED, one_in=2), ids=[mutant for _, mutant in PLANTED])
def test_a_planted_bug_is_found_at_once(stem: str, mutant: str) -> None:
    name = str(FOLDER / f"{stem}.py")
    report = found(mutant, name, 1)
    (finding,) = report.findings.values()
    assert report.schedules <= AT_ONCE
    assert adapter_named(name).mutant_named(mutant).signature in finding.failure.text
