"""The command line: what it accepts, what it prints, how it exits."""

import json
import re
from pathlib import Path

import pytest
from sample_tree import REPOSITORY, SampleTree
from typer.testing import CliRunner, Result

from ci import cli
from ci.errors import CiError
from ci.results import FileResult, FileStatus, RunResult, TestOutcome, TestResult
from ci.selection import SelectedFile
from ci.session import SessionOptions


def run(*words: str, root: Path | None = None) -> Result:
    return CliRunner().invoke(cli.app, [*words, *(("--root", str(root)) if root else ())])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], SessionOptions]]:
    """Runs are recorded, not run; a file named test_bad fails."""
    calls: list[tuple[list[str], SessionOptions]] = []

    def record(files: list[SelectedFile], options: SessionOptions, *_: object, **__: object) -> RunResult:
        calls.append(([file.path for file in files], options))
        return RunResult(tuple(result(file.path) for file in files))

    def result(path: str) -> FileResult:
        is_bad = "bad" in path
        outcome = TestOutcome.FAILED if is_bad else TestOutcome.PASSED
        tests = (TestResult("test_x", outcome, 7.5),)
        return FileResult(path, FileStatus.FAILED if is_bad else FileStatus.PASSED, 7.5, tests)

    monkeypatch.setattr(cli, "run_files", record)
    return calls


def test_this_repository_is_in_order() -> None:
    """A wrong registration is an error with file and line (E01)."""
    done = run("check", root=REPOSITORY)
    assert done.exit_code == 0, done.output
    assert re.search(r"\d+ registered test files, no problems", done.output)


def test_check_prints_place_problem_and_remedy(tree: SampleTree) -> None:
    """A wrong registration is an error with file and line (E01)."""
    tree.write("test_a.py", "def test_x(): pass\n")
    done = run("check", root=tree.root)
    assert done.exit_code == 1
    assert done.output.startswith("tests/registered/test_a.py:1: is not registered; add register_cpu_ci(")


def test_a_suite_runs_its_files_and_ends_with_the_count(
    tree: SampleTree, asked: list[tuple[list[str], SessionOptions]]
) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    path = tree.good("test_a.py")
    tree.write("test_b.py", 'from ci.register import register_cpu_ci\nregister_cpu_ci(est_time=1, suite="extra-cpu")\n')
    done = run("suite", "--hw", "cpu", "--suite", "base-cpu", "--root", str(tree.root), "--", "--tier", "sim", "-x")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "1 passed, 0 failed"
    ((paths, options),) = asked
    assert paths == [path]
    assert options.pytest_args == ("--tier", "sim", "-x")
    assert (options.timeout_s, options.stop_on_failure, options.repeat) == (600, True, 1)
    assert json.loads((tree.root / "out/ci/results.json").read_text())["files"][0]["path"] == path
    assert (tree.root / "out/ci/junit.xml").exists()


def test_a_failed_suite_exits_with_1(tree: SampleTree, asked: list[tuple[list[str], SessionOptions]]) -> None:
    tree.good("test_bad.py")
    done = run("suite", "--continue-on-error", "--timeout-per-file", "9", root=tree.root)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "0 passed, 1 failed"
    assert (asked[0][1].timeout_s, asked[0][1].stop_on_failure) == (9, False)


def test_options_of_a_workflow_come_by_the_environment(
    tree: SampleTree, asked: list[tuple[list[str], SessionOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.good("test_a.py")
    for name, value in (("CI_HW", "cpu"), ("CI_SUITE", "extra-cpu"), ("CI_STAGE", ""), ("CI_RUNNER_CONFIG", "")):
        monkeypatch.setenv(name, value)
    assert run("suite", root=tree.root).exit_code == 0
    assert asked[0][0] == []


def test_parts_are_disjoint_and_complete(tree: SampleTree) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    paths = {tree.good(f"test_{name}.py") for name in "abcde"}
    listed = [set(re.findall(r"tests/\S+", run("suite", "--list", "--part", part, root=tree.root).output))
              for part in ("1/2", "2/2")]  # fmt: skip
    assert listed[0] | listed[1] == paths
    assert not listed[0] & listed[1]


def test_times_are_recorded_for_the_next_partition(
    tree: SampleTree, asked: list[tuple[list[str], SessionOptions]]
) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    good, bad = tree.good("test_a.py", est_time=2), tree.good("test_bad.py")
    done = run("suite", "--record-times", "--continue-on-error", root=tree.root)
    assert json.loads((tree.root / "ci/measured.json").read_text()) == {"cpu": {good: 7.5}}
    assert "est_time=2 but the file was measured at 7.5 s" in done.output
    assert bad in asked[0][0]
    assert run("check", root=tree.root).exit_code == 1


def test_rerun_test_takes_specs_rounds_and_tier(
    tree: SampleTree, asked: list[tuple[list[str], SessionOptions]]
) -> None:
    """E06: the exact local command of an answer."""
    path = tree.good("test_a.py")
    done = run("rerun-test", "test_a.py::test_a", "--repeat", "20", "--tier", "sim", root=tree.root)
    assert done.exit_code == 0, done.output
    ((paths, options),) = asked
    assert paths == [path]
    assert options.nodes == {path: ("test_a",)}
    assert (options.repeat, options.timeout_s, options.pytest_args) == (20, 12_000, ("--tier", "sim"))


def test_rerun_test_takes_the_request_of_a_workflow(
    tree: SampleTree, asked: list[tuple[list[str], SessionOptions]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree.good("test_a.py")
    monkeypatch.setenv("CI_REQUEST", json.dumps({"specs": [path], "repeat": 3, "tier": "server"}))
    assert run("rerun-test", root=tree.root).exit_code == 0
    assert (asked[0][1].repeat, asked[0][1].pytest_args, asked[0][1].nodes) == (3, ("--tier", "server"), {})


@pytest.mark.parametrize(
    "request_text", ["{", "[]", '{"specs": ["a"], "repeat": 0}', '{"specs": ["a"], "x": 1}', "x" * 70_000]
)
def test_a_wrong_request_is_refused(tree: SampleTree, request_text: str) -> None:
    """A comment is hostile input (E05)."""
    done = run("rerun-test", "--request", request_text, root=tree.root)
    assert isinstance(done.exception, CiError)
    assert "--request" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--suite", "nope"), "unknown suite or stage 'nope'"),
        (("--hw", "cuda", "--suite", "base-cpu"), "does not go with"),
        (("--hw", "cpu", "--stage", "extra-b"), "does not go with"),
        (("--hw", "cuda", "--runner-config", "9-gpu"), "unknown runner"),
        (("--part", "3/2"), "1 <= I <= N"),
        (("--part", "0/2"), "1 <= I <= N"),
        (("--part", "x"), "1 <= I <= N"),
    ],
)
def test_wrong_options_are_refused(tree: SampleTree, words: tuple[str, ...], text: str) -> None:
    done = run("suite", *words, root=tree.root)
    assert done.exit_code == 2
    assert text in " ".join(done.output.replace("\u2502", " ").split())


def test_an_error_of_ci_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ci", "check", "--root", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "suites.toml: cannot be read" in capsys.readouterr().err
