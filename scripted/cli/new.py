"""``scripted new``: the first version of a race test, which runs and passes at once.

Owns the rules for its name and place; never overwrites a file. An adapter may have its own first test; for all others
it is a template beside this file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scripted.cli.offers import HasExamples
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.new_files import render_source, write_new
from scripted.script.on_adapters import script_runner

DEFAULT_FOLDER: Final = Path("tests/registered")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATE: Final = Path(__file__).with_name("new_test.py.jinja")
_RUFF_FILES: Final = ("ruff.toml", ".ruff.toml")
# Ruff's rules against an unused comparison or value, an asserted tuple, and a name compared with itself.
_LINT_RULES: Final = """# Rules that find tests of nothing.
lint.extend-select = ["B015", "B018", "F631", "PLR0124"]
"""


def new_test(
    name: str,
    *,
    folder: Path = DEFAULT_FOLDER,
    settings: Mapping[str, str] | None = None,
    adapter: str = DEFAULT_ADAPTER,
) -> Path:
    """Write ``test_<name>.py`` and return its path. ``settings`` are values for the adapter's configuration.

    Raises ScriptDefinitionError for a name that is invalid or taken and for an adapter without scripts, and the
    adapter's errors for an impossible configuration.
    """
    _check_name(name)
    script_runner(adapter)
    known, settings = adapter_named(adapter), settings or {}
    config = known.read_config(settings)
    if isinstance(known, HasExamples):
        text = known.first_test(name, settings)
    else:
        words = {field: repr(value) for field, value in known.config_words(config).items()}
        text = render_source(_TEMPLATE, name=name, adapter=adapter, settings=words)
    path = folder / f"test_{name}.py"
    # Pytest imports test files by their bare name, so each name may exist only once across all folders.
    taken = next((other for other in sorted(folder.rglob(path.name)) if other.is_file()), None)
    if taken is not None:
        raise ScriptDefinitionError(f"{taken} is there already; choose another name than {name!r}")
    write_new(path, text)
    return path


def write_lint_rules(folder: Path) -> Path | None:
    """Write ruff's rules for tests into a project folder without ruff settings; return the file."""
    for parent in (folder.resolve(), *folder.resolve().parents):
        project = parent / "pyproject.toml"
        is_set = project.is_file() and "ruff" in tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
        if is_set or any((parent / name).is_file() for name in _RUFF_FILES):
            return None
    rules = folder / _RUFF_FILES[0]
    write_new(rules, _LINT_RULES)
    return rules


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.startswith("test_"):
        raise ScriptDefinitionError(
            f"a test is named by small letters, digits and underscores, from a letter on and without test_, "
            f"got {name!r}; write scripted new flush_meets_abort"
        )
