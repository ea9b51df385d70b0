"""``scripted new``: the first version of a registered race test, which runs and passes at once in both tiers.

Owns the rules for its name and place; never overwrites a file. The text itself is a template beside this file.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from engine.config import EngineConfig
from scripted.errors import ScriptDefinitionError

__all__ = ["DEFAULT_FOLDER", "command_of", "new_test", "render_source", "write_new"]

DEFAULT_FOLDER: Final = Path("tests/registered")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATE: Final = Path(__file__).with_name("new_test.py.jinja")
# A server boots and runs one script in so many seconds, and each stage is one more process to start.
_BASE_TIME_S: Final = 4
_STAGE_TIME_S: Final = 1


def new_test(name: str, *, folder: Path = DEFAULT_FOLDER, pp_size: int = 4) -> Path:
    """Write ``test_<name>.py`` and return its path.

    Raises ScriptDefinitionError for a name that is none or is taken, ConfigError for a number of stages that cannot be.
    """
    _check_name(name)
    EngineConfig(pp_size=pp_size)
    path = folder / f"test_{name}.py"
    # Pytest imports test files by their bare name, so one name may be there only once, in whatever folder.
    taken = next((other for other in sorted(folder.rglob(path.name)) if other.is_file()), None)
    if taken is not None:
        raise ScriptDefinitionError(f"{taken} is there already; choose another name than {name!r}")
    values = {"name": name, "pp_size": pp_size, "est_time": _BASE_TIME_S + _STAGE_TIME_S * pp_size}
    write_new(path, render_source(_TEMPLATE, **values))
    return path


def command_of(path: Path) -> str:
    """The command that runs a test file where a test takes milliseconds."""
    return f"pytest {shlex.quote(str(path))} --tier sim"


def render_source(template: Path, **values: Any) -> str:
    """Python source from a template; a name that the template needs and was not given is an error."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=False,  # noqa: S701 - it writes Python, where an escaped quote would be a syntax error
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(**values)


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises ScriptDefinitionError when it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as exc:
        raise ScriptDefinitionError(f"{path} is there already; choose another name") from exc


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.startswith("test_"):
        raise ScriptDefinitionError(
            f"a test is named by small letters, digits and underscores, from a letter on and without test_, "
            f"got {name!r}; write scripted new flush_meets_abort"
        )
