"""Partitions are near the ideal, the same on every machine, and stable for ties."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tree import SampleTree

from ci.selection import SelectedFile, Selector, disabled_files, parts_of, select
from ci.suites import Hardware
from ci.times import MeasuredTimes

FILES = 200
Item = tuple[str, float]


def cut(items: list[Item], parts: int) -> tuple[tuple[Item, ...], ...]:
    files = tuple(SelectedFile(name, seconds, "") for name, seconds in items)
    return tuple(tuple((one.path, one.seconds) for one in part) for part in parts_of(files, parts))


def files(seed: int) -> list[Item]:
    """Times as suites have them: many short files, a few of minutes."""
    rng = random.Random(seed)
    return [(f"test_{index:03}.py", round(min(90.0, rng.lognormvariate(2.0, 1.0)), 1)) for index in range(FILES)]


@pytest.mark.parametrize("parts", range(2, 17))
def test_the_longest_part_is_within_a_tenth_of_the_ideal(parts: int) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    for seed in range(20):
        items = files(seed)
        ideal = max(sum(seconds for _, seconds in items) / parts, max(seconds for _, seconds in items))
        longest = max(sum(seconds for _, seconds in part) for part in cut(items, parts))
        assert longest <= 1.1 * ideal, (seed, longest, ideal)


@given(st.randoms(use_true_random=False), st.integers(1, 16), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_the_cut_depends_on_the_files_alone(rng: random.Random, parts: int, seed: int) -> None:
    items = files(seed)
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert cut(items, parts) == cut(shuffled, parts)
    assert sorted(item for part in cut(shuffled, parts) for item in part) == sorted(items)


def test_ties_go_by_name() -> None:
    items = [(name, 1.0) for name in "dbca"]
    assert cut(items, 2) == ((("a", 1.0), ("c", 1.0)), (("b", 1.0), ("d", 1.0)))


def test_files_without_time_are_spread_too() -> None:
    assert [len(part) for part in cut([(name, 0.0) for name in "abcdef"], 3)] == [2, 2, 2]


def test_no_parts_is_an_error() -> None:
    with pytest.raises(ValueError, match="parts must be >= 1, got 0"):
        cut([], 0)


def test_parts_of_a_suite_use_measured_times_before_estimates(tree: SampleTree) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    paths = [tree.good(f"test_{name}.py", est_time=10) for name in "abcd"]
    times = MeasuredTimes({"cpu": {paths[0]: 30.0}})
    chosen = select(tree.registry, times, Selector(Hardware.CPU, "base-cpu"))
    assert [file.seconds for file in chosen] == [30.0, 10.0, 10.0, 10.0]
    assert [[file.path for file in part] for part in parts_of(chosen, 2)] == [paths[:1], paths[1:]]


def test_selection_by_suite_night_and_disabled(tree: SampleTree) -> None:
    text = "from ci.register import register_cpu_ci\nregister_cpu_ci(est_time=1, {})\ndef test_x(): pass\n"
    day = tree.write("test_day.py", text.format('suite="base-cpu"'))
    night = tree.write("test_night.py", text.format('suite="base-cpu", nightly=True'))
    off = tree.write("test_off.py", text.format('suite="base-cpu", disabled="a driver bug"'))
    extra = tree.write("test_extra.py", text.format('suite="extra-cpu"'))

    def paths(selector: Selector) -> list[str]:
        return [file.path for file in select(tree.registry, MeasuredTimes({}), selector)]

    assert paths(Selector(Hardware.CPU, "base-cpu")) == [day]
    assert paths(Selector(Hardware.CPU, nightly=True)) == [day, extra, night]
    apart = frozenset({"extra-cpu"})
    assert paths(Selector(Hardware.CPU, apart=apart)) == [day]
    assert paths(Selector(Hardware.CPU, "extra-cpu", apart=apart)) == [extra]
    assert paths(Selector(Hardware.CUDA)) == []
    assert disabled_files(tree.registry, Selector(Hardware.CPU)) == ((off, "a driver bug"),)


def test_equal_engine_configurations_stand_side_by_side(tree: SampleTree) -> None:
    text = (
        "from ci.register import register_cpu_ci\nregister_cpu_ci(est_time=1, suite='base-cpu')\n"
        "@scripted(EngineConfig(pp_size={}))\ndef test_x(t):\n    yield\n"
    )
    for name, size in (("a", 4), ("b", 1), ("c", 4), ("d", 1)):
        tree.write(f"test_{name}.py", text.format(size))
    chosen = select(tree.registry, MeasuredTimes({}), Selector(Hardware.CPU))
    assert [file.path[-4] for file in chosen] == ["b", "d", "a", "c"]


def test_a_disabled_registration_does_not_hide_another(tree: SampleTree) -> None:
    path = tree.write(
        "test_both.py",
        """
        from ci.register import register_cpu_ci
        register_cpu_ci(est_time=1, suite="base-cpu", disabled="too slow there")
        register_cpu_ci(est_time=1, suite="extra-cpu")
        def test_x(): pass
        """,
    )
    assert [file.path for file in select(tree.registry, MeasuredTimes({}), Selector(Hardware.CPU))] == [path]
