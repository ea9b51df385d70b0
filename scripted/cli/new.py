"""``scripted new``: the first version of a race test, which runs and passes at once in both tiers.

Owns the rules for its name and place; never overwrites a file. The text itself is a template beside this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from engine.config import EngineConfig
from scripted.core.refusals import ScriptDefinitionError
from scripted.new_files import command_of, render_source, write_new

__all__ = ["DEFAULT_FOLDER", "command_of", "new_test", "render_source", "write_new"]

DEFAULT_FOLDER: Final = Path("tests/registered")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATE: Final = Path(__file__).with_name("new_test.py.jinja")


def new_test(name: str, *, folder: Path = DEFAULT_FOLDER, pp_size: int = 4) -> Path:
    """Write ``test_<name>.py`` and return its path.

    Raises ScriptDefinitionError for a name that is invalid or taken, ConfigError for an impossible number of stages.
    """
    _check_name(name)
    EngineConfig(pp_size=pp_size)
    path = folder / f"test_{name}.py"
    # Pytest imports test files by their bare name, so one name may be there only once, in whatever folder.
    taken = next((other for other in sorted(folder.rglob(path.name)) if other.is_file()), None)
    if taken is not None:
        raise ScriptDefinitionError(f"{taken} is there already; choose another name than {name!r}")
    write_new(path, render_source(_TEMPLATE, name=name, pp_size=pp_size))
    return path


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.startswith("test_"):
        raise ScriptDefinitionError(
            f"a test is named by small letters, digits and underscores, from a letter on and without test_, "
            f"got {name!r}; write scripted new flush_meets_abort"
        )
