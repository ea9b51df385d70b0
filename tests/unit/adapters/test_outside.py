"""The engine's scheduler as an outsider would adapt it: healthy under the checks for every scheduler, and red where
the gallery breaks what they promise.
"""

from __future__ import annotations

import pytest
from thinned import thinned

from scripted.core.adapters import adapter_named
from scripted.search.campaign import Campaign
from scripted.search.units import SearchPlan

NAME = "examples/lockstep/outside.py"


@pytest.mark.parametrize("workload", thinned(["twins", "full", "aborted", "priorities", "paused"], one_in=3))
def test_the_engine_keeps_what_every_scheduler_promises(workload: str) -> None:
    report = Campaign(SearchPlan(targets=(workload,), adapter=NAME, schedules=150)).run()
    assert not report.findings
    assert report.schedules == 150


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        ("retraction-frees-too-late", ""),
        ("every-chunk-emits-a-token", ""),
        ("abort-waits-for-a-token", "it was aborted"),
        ("flush-answers-but-does-nothing", "everything has ended, but"),
        ("a-registry-grows", "something has grown"),
        ("the-first-token-never-stops", "but alone it says"),
    ],
)
def test_a_bug_of_the_gallery_is_found_by_them(mutant: str, words: str) -> None:
    targets = tuple(adapter_named(NAME).workloads)
    report = Campaign(SearchPlan(targets=targets, adapter=NAME, mutant=mutant, stop_at_first=True)).run()
    (finding,) = report.findings.values()
    assert words in finding.failure.text
