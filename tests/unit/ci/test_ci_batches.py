"""Targets are grouped by runner and cut under a time limit."""

import pytest
from sample_tree import SampleTree

from ci.batches import BATCH_LIMIT_S, BATCHES_MAX, Cut, cut_batches
from ci.errors import CommandRefusedError
from ci.specs import resolve_specs
from ci.suites import Hardware
from ci.times import MeasuredTimes

TEXT = """
from ci.register import register_cpu_ci, register_cuda_ci
{}
def test_x(): pass
"""
CPU = 'register_cpu_ci(est_time={}, suite="base-cpu")'
CUDA = 'register_cuda_ci(est_time={}, stage="extra-b", runner_config="{}")'


def cut(tree: SampleTree, *, repeat: int = 1, hardware: Hardware | None = None, times: float | None = None) -> Cut:
    measured = {} if times is None else {"cpu": {file.path: times for file in tree.registry.files}}
    targets = resolve_specs(("tests/registered",), tree.registry)
    return cut_batches(targets, MeasuredTimes(measured), repeat=repeat, hardware=hardware)


def shape(found: Cut) -> list[tuple[str, list[str]]]:
    return [(batch.runner, [target.file.path[-4] for target in batch.targets]) for batch in found.batches]


@pytest.fixture
def mixed(tree: SampleTree) -> SampleTree:
    tree.write("test_a.py", TEXT.format(f"{CPU.format(600)}\n{CUDA.format(60, '1-gpu')}"))
    tree.write("test_b.py", TEXT.format(CUDA.format(60, "4-gpu")))
    tree.write("test_c.py", TEXT.format(CPU.format(600)))
    tree.write("test_d.py", TEXT.format(CUDA.format(60, "1-gpu")))
    return tree


def test_files_go_to_the_cpu_where_they_can(mixed: SampleTree) -> None:
    assert shape(cut(mixed)) == [("1-gpu", ["d"]), ("4-gpu", ["b"]), ("cpu", ["a", "c"])]


def test_other_hardware_can_be_asked_for(mixed: SampleTree) -> None:
    (mixed.root / "tests/registered/test_c.py").unlink()
    assert shape(cut(mixed, hardware=Hardware.CUDA)) == [("1-gpu", ["a", "d"]), ("4-gpu", ["b"])]
    with pytest.raises(CommandRefusedError, match="is not registered for cpu; it is for cuda"):
        cut(mixed, hardware=Hardware.CPU)


def test_batches_stay_under_the_limit(tree: SampleTree) -> None:
    for name in "abcdefg":
        tree.good(f"test_{name}.py", est_time=500)
    batches = cut(tree).batches
    assert [len(batch.targets) for batch in batches] == [3, 3, 1]
    assert all(batch.seconds <= BATCH_LIMIT_S for batch in batches)
    assert [len(batch.targets) for batch in cut(tree, times=100).batches] == [7]  # Measured times win over estimates.
    assert [len(batch.targets) for batch in cut(tree, repeat=10).batches] == [1] * 7
    assert batches[0].timeout_minutes == 15 + 75


def test_what_would_take_for_ever_is_refused(tree: SampleTree) -> None:
    tree.good("test_long.py", est_time=600)
    with pytest.raises(CommandRefusedError, match="about 500 minutes, more than 180; lower --repeat"):
        cut(tree, repeat=50)
    for index in range(BATCHES_MAX):
        tree.good(f"test_{index}.py", est_time=1800)
    with pytest.raises(CommandRefusedError, match="that is 17 runs, more than 16"):
        cut(tree)


def test_disabled_tests_are_left_out_and_named(tree: SampleTree) -> None:
    off = tree.write("test_off.py", TEXT.format(CPU.format(5)[:-1] + ', disabled="a driver bug")'))
    with pytest.raises(CommandRefusedError, match=r"no test named can run: .*test_off\.py: a driver bug"):
        cut(tree)
    tree.good("test_x.py")
    assert cut(tree).disabled == ((off, "a driver bug"),)


def test_what_no_runner_has_the_environment_of_is_left_out_and_named(tree: SampleTree) -> None:
    path = tree.write("test_own.py", TEXT.format(CPU.format(5).replace("base-cpu", "vllm-cpu")))
    apart = tree.catalogue.own_environments
    targets = resolve_specs(("tests/registered",), tree.registry)
    with pytest.raises(CommandRefusedError, match=r"no test named can run: .*test_own\.py: .*its own: make vllm"):
        cut_batches(targets, MeasuredTimes({}), apart=apart)
    tree.good("test_x.py")
    found = cut_batches(resolve_specs(("tests/registered",), tree.registry), MeasuredTimes({}), apart=apart)
    assert found.disabled == ((path, "vllm-cpu has an environment of its own: make vllm"),)


def test_a_long_list_is_cut_for_the_size_of_an_input(tree: SampleTree) -> None:
    for index in range(120):
        tree.good(f"test_{index:03}.py", est_time=1)
    assert [len(batch.targets) for batch in cut(tree).batches] == [100, 20]
