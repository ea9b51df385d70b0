"""The results of a run: of tests and of files, and all of them as counts, JSON and JUnit.

One definition for the table, the stored files and the answer on a pull request; frozen, without any running.
"""

import os
import re
from collections import Counter
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree as ET  # Only written here, never parsed.

import msgspec

from ci.errors import CiError

XML_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class TestOutcome(StrEnum):
    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class FileStatus(StrEnum):
    """How a file ended. EMPTY: there was no test to run, so it has shown nothing."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    EMPTY = "empty"
    NOT_RUN = "not run"


class TestResult(msgspec.Struct, frozen=True):
    """One run of one test; a repeated test has one for each round."""

    __test__ = False

    name: str
    outcome: TestOutcome
    seconds: float
    error: str = ""
    text: str = ""


class FileResult(msgspec.Struct, frozen=True):
    """The result of one file. `note` says why it was killed, with stacks, or has the errors of an earlier try."""

    path: str
    status: FileStatus
    seconds: float
    tests: tuple[TestResult, ...] = ()
    attempts: int = 1
    note: str = ""

    def count(self, outcome: TestOutcome) -> int:
        return sum(test.outcome is outcome for test in self.tests)

    @property
    def failed_tests(self) -> dict[str, tuple[int, list[str]]]:
        """Each failed test, with its number of runs and its errors."""
        runs = Counter(test.name for test in self.tests)
        errors: dict[str, list[str]] = {}
        for test in self.tests:
            if test.outcome is TestOutcome.FAILED:
                errors.setdefault(test.name, []).append(test.error)
        return {name: (runs[name], of) for name, of in errors.items()}

    @property
    def ok(self) -> bool:
        return self.status is FileStatus.PASSED

    @property
    def failures(self) -> int:
        """Failed runs; a file that was killed or died counts at least once."""
        failed = self.count(TestOutcome.FAILED)
        return failed if self.ok or self.status is FileStatus.NOT_RUN else max(1, failed)


class RunResult(msgspec.Struct, frozen=True):
    files: tuple[FileResult, ...]

    @property
    def passed(self) -> int:
        return sum(file.count(TestOutcome.PASSED) for file in self.files)

    @property
    def failed(self) -> int:
        """Test runs that failed, and files that ended without a verdict."""
        return sum(file.failures for file in self.files)

    @property
    def ok(self) -> bool:
        return all(file.ok for file in self.files)

    @property
    def last_line(self) -> str:
        return f"{self.passed} passed, {self.failed} failed"


def require_writable(path: Path) -> None:
    """Raise CiError for a place where no results can be written, before the tests run instead of after."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not above.is_dir():
        why = f"{above} is no folder"
    elif not os.access(path if path.exists() else above, os.W_OK):
        why = f"{path if path.exists() else above} is closed to writing"
    if why is not None:
        raise CiError(f"the results cannot be written to {path}: {why}; name another file with --json or --junit")


def write_json(result: RunResult, path: Path) -> None:
    """Write the result for programs; `msgspec.json.decode(..., type=RunResult)` reads it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def write_junit(result: RunResult, path: Path) -> None:
    """Write JUnit XML: a suite for each file, a case for each test run, an error for a file without a verdict."""
    root = ET.Element("testsuites", name="ci")
    for file in result.files:
        root.append(_suite_element(file))
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.indent(root)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _suite_element(file: FileResult) -> ET.Element:
    without_verdict = file.status in (FileStatus.TIMEOUT, FileStatus.CRASHED, FileStatus.NOT_RUN)
    suite = ET.Element(
        "testsuite",
        name=file.path,
        tests=str(len(file.tests) + without_verdict),
        failures=str(file.count(TestOutcome.FAILED)),
        errors=str(int(without_verdict)),
        skipped=str(file.count(TestOutcome.SKIPPED)),
        time=f"{file.seconds:.3f}",
    )
    for test in file.tests:
        suite.append(_case_element(file.path, test))
    if without_verdict:
        case = ET.SubElement(suite, "testcase", classname=file.path, name=str(file.status), time="0")
        ET.SubElement(case, "error", message=_xml(file.note[:200])).text = _xml(file.note)
    elif file.note:
        ET.SubElement(suite, "system-out").text = _xml(file.note)
    return suite


def _case_element(path: str, test: TestResult) -> ET.Element:
    case = ET.Element("testcase", classname=path, name=_xml(test.name), time=f"{test.seconds:.3f}")
    if test.outcome is TestOutcome.SKIPPED:
        ET.SubElement(case, "skipped")
    elif test.outcome is TestOutcome.FAILED:
        ET.SubElement(case, "failure", message=_xml(test.error), type=_xml(test.error)).text = _xml(test.text)
    return case


def _xml(text: str) -> str:
    return XML_FORBIDDEN.sub("?", text)
