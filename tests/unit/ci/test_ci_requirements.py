"""The page of requirements: as new as the tests, complete, and made from docstrings alone."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ci.cli import app
from ci.requirements import PAGE, files_by_number, rendered, untested

ROOT = Path(__file__).parents[3]
PAGE_OF_TWO = (
    "# Title\n\n- **A01**: block\n  Tests: none\n- **A02**: report\n  and tell\n  Tests: `old`,\n  `older`\n\nEnd.\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).parent.mkdir(parents=True)
    (tmp_path / PAGE).write_text(PAGE_OF_TWO)
    (tmp_path / "tests/unit/test_wait.py").write_text('def test_it():\n    """A01: it waits."""\n    # A02\n')
    return tmp_path


@pytest.fixture(scope="module")
def ours() -> dict[str, list[str]]:
    """The docstrings of all tests are read once."""
    return files_by_number(ROOT)


def test_the_page_is_as_new_as_the_tests(ours: dict[str, list[str]]) -> None:
    page, tests = (ROOT / PAGE).read_text(encoding="utf-8"), ours
    assert untested(page, tests) == []
    assert rendered(page, tests) == page, "run: python -m ci requirements --write"


def test_every_number_has_a_rule(ours: dict[str, list[str]]) -> None:
    """A number that a test names and the page does not know is a misprint, or a rule that is missing."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert [number for number in ours if f"- **{number}**: " not in page] == []
    for letter, last in (("A", 8), ("B", 18), ("C", 11), ("D", 12), ("E", 6)):
        assert page.count(f"\n- **{letter}") == last


def test_only_docstrings_count(tree: Path) -> None:
    tests = files_by_number(tree)
    assert tests == {"A01": ["tests/unit/test_wait.py"]}
    assert untested(PAGE_OF_TWO, tests) == ["A02"]
    assert rendered(PAGE_OF_TWO, tests).splitlines() == [
        "# Title",
        "",
        "- **A01**: block",
        "  Tests: `unit/test_wait.py`",
        "- **A02**: report and tell",
        "  Tests: none",
        "",
        "End.",
    ]


def test_the_command_says_what_is_missing_and_old(tree: Path) -> None:
    runner = CliRunner()
    first = runner.invoke(app, ["requirements", "--root", str(tree)])
    assert first.exit_code == 1
    assert "no test names A02" in first.output
    assert "run: python -m ci requirements --write" in first.output.replace("\n", " ")
    (tree / "tests/unit/test_report.py").write_text('"""A02"""\n')
    assert runner.invoke(app, ["requirements", "--root", str(tree), "--write"]).exit_code == 0
    assert runner.invoke(app, ["requirements", "--root", str(tree)]).exit_code == 0
    assert "`unit/test_report.py`" in (tree / PAGE).read_text()


def test_a_tree_without_the_page_is_told_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["requirements", "--root", str(tmp_path)])
    assert "there is no such file" in str(result.exception)
