"""Results as JSON, JUnit and a table."""

import io
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
from rich.console import Console

from ci.results import FileResult, FileStatus, RunResult, TestOutcome, TestResult, write_json, write_junit
from ci.selection import SelectedFile
from ci.summary import print_summary

RESULT = RunResult(
    (
        FileResult(
            "tests/a.py",
            FileStatus.FAILED,
            1.5,
            (
                TestResult("test_ok", TestOutcome.PASSED, 1.0),
                TestResult("test_skip", TestOutcome.SKIPPED, 0.0),
                TestResult("test_bad[<&>]", TestOutcome.FAILED, 0.5, "ValueError", "a\x1b[31m\x00 <b> & [red]"),
            ),
        ),
        FileResult("tests/b.py", FileStatus.TIMEOUT, 0.0, note="took longer than 3 s; [bold]stacks"),
        FileResult("tests/c.py", FileStatus.NOT_RUN, 0.0),
        FileResult(
            "tests/d.py", FileStatus.PASSED, 0.1, (TestResult("t", TestOutcome.PASSED, 0.1),), attempts=2, note="x"
        ),
    )
)


def test_counts() -> None:
    assert (RESULT.passed, RESULT.failed, RESULT.ok) == (2, 2, False)
    assert RESULT.last_line == "2 passed, 2 failed"


def test_json_reads_back(tmp_path: Path) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    write_json(RESULT, tmp_path / "out" / "results.json")
    assert msgspec.json.decode((tmp_path / "out" / "results.json").read_bytes(), type=RunResult) == RESULT


def test_junit_is_sound_whatever_a_test_printed(tmp_path: Path) -> None:
    """Suites, parts, times and retries are what was declared (E02)."""
    write_junit(RESULT, tmp_path / "out" / "junit.xml")
    suites = ET.parse(tmp_path / "out" / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["tests/a.py", "tests/b.py", "tests/c.py", "tests/d.py"]
    assert [suite.get("failures") for suite in suites] == ["1", "0", "0", "0"]
    assert [suite.get("errors") for suite in suites] == ["0", "1", "1", "0"]
    failure = suites[0].find("testcase/failure")
    assert failure is not None
    assert failure.text == "a?[31m? <b> & [red]"
    assert suites[0].get("tests") == str(len(suites[0].findall("testcase"))) == "3"


def test_the_table_says_all_and_ends_with_the_count() -> None:
    stream = io.StringIO()
    print_summary(Console(file=stream, width=120), RESULT, [SelectedFile("tests/a.py", 3.0, "")])
    text = stream.getvalue()
    assert text.splitlines()[-1] == "2 passed, 2 failed"
    assert "tests/a.py::test_bad[<&>]: failed 1 of 1 (ValueError)" in text
    assert "took longer than 3 s; [bold]stacks" in text
    assert "passed (try 2)" in text
    assert "not run" in text


def test_a_file_without_a_test_to_run_makes_no_green_run() -> None:
    """A file whose tests have all gone, or were all left out, has shown nothing."""
    empty = FileResult("tests/registered/a/test_gone.py", FileStatus.EMPTY, 0.0)
    run = RunResult((empty,))
    assert not run.ok
    assert run.last_line == "0 passed, 1 failed"
