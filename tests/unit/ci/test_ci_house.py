"""The product's own rules: it knows nothing of what it tests, and starts quickly."""

import ast
import subprocess
import sys
from pathlib import Path

from every_case import every_case
from sample_tree import REPOSITORY

FILES = sorted((REPOSITORY / "ci").glob("*.py"))


@every_case("path", FILES)
def test_ci_imports_nothing_of_the_code_under_test(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="ascii"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    tested = {"engine", "lockstep", "scripted", "torch", "transformers"}
    # What reads JSON of strangers is one for all: it needs msgspec alone.
    assert {name for name in imported if name.partition(".")[0] in tested} <= {"lockstep.documents", "lockstep.errors"}


def test_registration_costs_a_test_file_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ci.register; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ci', 'ci.register']"
