"""Lists, on the page of requirements, the tests that name each number in a docstring.

People write the numbers and rules on the page; the lists of tests come from the tests alone. Tests are parsed, never
imported.
"""

import ast
import re
import textwrap
from collections import defaultdict
from pathlib import Path

PAGE = Path("benchmarks/tables/requirements.md")
TESTS = Path("tests")

_NUMBER = re.compile(r"\b[A-E]\d\d\b")
_RULE = re.compile(
    r"^- \*\*(?P<number>[A-E]\d\d)\*\*: (?P<text>.*?)\n  Tests: .*?(?=\n(?:-|\n|\Z))", re.DOTALL | re.MULTILINE
)
_WIDTH_COLUMNS = 100
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files_by_number(root: Path) -> dict[str, list[str]]:
    """Return the test files that name each number in a docstring, relative to ``root`` and sorted."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((root / TESTS).rglob("*.py")):
        for number in _numbers_in(path):
            found[number].add(path.relative_to(root).as_posix())
    return {number: sorted(files) for number, files in sorted(found.items())}


def rendered(page: str, tests: dict[str, list[str]]) -> str:
    """Rewrite each rule's list of tests; everything else stays."""
    return _RULE.sub(lambda rule: _rule(rule, tests), page)


def untested(page: str, tests: dict[str, list[str]]) -> list[str]:
    """Return the numbers on the page that no test names."""
    return [rule["number"] for rule in _RULE.finditer(page) if rule["number"] not in tests]


def _numbers_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return {number for text in texts for number in _NUMBER.findall(text)}


def _rule(rule: re.Match[str], tests: dict[str, list[str]]) -> str:
    names = [f"`{Path(file).relative_to(TESTS).as_posix()}`" for file in tests.get(rule["number"], [])]
    named = _wrapped("Tests: " + (", ".join(names) or "none"), "  ")
    return _wrapped(f"- **{rule['number']}**: {' '.join(rule['text'].split())}", "") + "\n" + named


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH_COLUMNS,
        initial_indent=indent,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
