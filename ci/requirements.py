"""The page of requirements: which tests name which number in a docstring.

The page holds the numbers and their texts, written by people; its last column is made from the tests and nothing else.
Tests are parsed, never imported.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

__all__ = ["PAGE", "files_by_number", "rendered", "untested"]

PAGE = Path("docs/requirements.md")
TESTS = Path("tests")

_NUMBER = re.compile(r"\b[A-E]\d\d\b")
_ROW = re.compile(r"^\| (?P<number>[A-E]\d\d) \| (?P<text>.*?) \|.*\|$")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files_by_number(root: Path) -> dict[str, list[str]]:
    """The test files, relative to ``root`` and sorted, that name each number in a docstring."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / TESTS).rglob("*.py")):
        for number in _numbers_in(path):
            found[number].add(path.relative_to(root).as_posix())
    return {number: sorted(files) for number, files in sorted(found.items())}


def rendered(page: str, tests: dict[str, list[str]]) -> str:
    """The page with its last column made anew; everything else stays as it is."""
    return "".join(_row(line, tests) for line in page.splitlines(keepends=True))


def untested(page: str, tests: dict[str, list[str]]) -> list[str]:
    """The numbers on the page that no test names."""
    rows = (_ROW.match(line) for line in page.splitlines())
    return [row["number"] for row in rows if row is not None and row["number"] not in tests]


def _numbers_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return {number for text in texts for number in _NUMBER.findall(text)}


def _row(line: str, tests: dict[str, list[str]]) -> str:
    row = _ROW.match(line)
    if row is None:
        return line
    names = ", ".join(f"`{Path(file).relative_to(TESTS).as_posix()}`" for file in tests.get(row["number"], []))
    return f"| {row['number']} | {row['text']} | {names or 'none'} |\n"
