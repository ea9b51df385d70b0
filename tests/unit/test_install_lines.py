"""The pages' install lines name existing things; ``make pages`` also runs each against a copy of the repository."""

from __future__ import annotations

import shlex
import tomllib

from every_case import every_case
from install_lines import ROOT, install_lines
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = list(install_lines())


def test_the_readme_says_how_to_install_with_and_without_the_server() -> None:
    said = {line for page, line in LINES if page == "README.md"}
    name = PROJECT["name"]
    assert f'pip install "{name} @ git+$REPOSITORY"' in said
    assert f'pip install "{name}[serve] @ git+$REPOSITORY"' in said
    assert {"pip install .", "pip install '.[serve]'"} <= said


@every_case("line", [line for _, line in LINES])
def test_an_install_line_names_what_there_is(line: str) -> None:
    """No index has the package: the first installation is from Git or a clone, and adds extras to what is there."""
    *_, what = shlex.split(line)
    is_clone = what.startswith(".")
    named = PROJECT["name"] + what[1:] if is_clone else what
    requirement = Requirement(named.replace("git+$REPOSITORY", "git+file:///clone"))
    assert requirement.name == PROJECT["name"]
    assert requirement.extras <= PROJECT["optional-dependencies"].keys()
    assert requirement.url or requirement.extras or is_clone, f"{line}: no index has {requirement.name}"
