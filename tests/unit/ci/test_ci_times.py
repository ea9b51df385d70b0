"""Measured times: stored, merged, and held against the estimates."""

import pytest
from sample_tree import REPOSITORY, SampleTree

from ci.errors import TimesError
from ci.registry import read_registry
from ci.suites import Catalogue, Hardware
from ci.times import MeasuredTimes, estimate_findings


def test_times_survive_a_round_trip_and_forget_files_that_are_gone(tree: SampleTree) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    times = MeasuredTimes({"cpu": {"gone.py": 1.0, "kept.py": 2.0}, "cuda": {"kept.py": 9.0}})
    new = times.updated(Hardware.CPU, [("new.py", 3.14159)], frozenset({"kept.py", "new.py"}))
    new.save(tree.root)
    loaded = MeasuredTimes.load(tree.root)
    assert loaded.seconds == {"cpu": {"kept.py": 2.0, "new.py": 3.14}, "cuda": {"kept.py": 9.0}}
    assert loaded.get(Hardware.CPU, "new.py") == 3.14
    assert loaded.get(Hardware.CUDA, "new.py") is None


def test_no_file_means_nothing_was_measured(tree: SampleTree) -> None:
    assert MeasuredTimes.load(tree.root).seconds == {}


def test_a_broken_file_is_an_error_with_its_remedy(tree: SampleTree) -> None:
    (tree.root / "ci" / "measured.json").write_text('{"cpu": {"a": "fast"}}')
    with pytest.raises(TimesError, match=r"measured\.json.*--record-times"):
        MeasuredTimes.load(tree.root)


@pytest.mark.parametrize(
    ("estimate", "measured", "is_found"),
    [
        (10, 10, False),
        (10, 5, False),
        (10, 20, False),
        (10, 21, True),
        (10, 4.9, True),
        (1, 0.01, False),
        (1, 4.1, True),
    ],
)
def test_estimates_are_held_to_a_factor_of_two(
    tree: SampleTree, estimate: float, measured: float, is_found: bool
) -> None:
    path = tree.good("test_a.py", est_time=estimate)
    findings = estimate_findings(tree.registry, MeasuredTimes({"cpu": {path: measured}}))
    assert [finding.line for finding in findings] == ([3] if is_found else [])


def test_the_estimates_of_this_repository_hold() -> None:
    registry = read_registry(REPOSITORY, Catalogue.load(REPOSITORY))
    assert estimate_findings(registry, MeasuredTimes.load(REPOSITORY)) == []
