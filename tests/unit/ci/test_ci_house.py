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
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert not imported & {"engine", "lockstep", "scripted", "torch", "transformers"}


def test_registration_costs_a_test_file_nothing() -> None:
    code = "import sys; before = set(sys.modules); import ci.register; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ci', 'ci.register']"
