"""Permits commands by repository role, by the file `ci/permissions.json`, and to the author of a pull request.

Pure: the caller passes roles and names. The file is read from the default branch, never from the pull request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ci.commands import COMMANDS, Command, TagAndRerunCi, TagRunCiLabel, name_of
from ci.errors import CatalogueError
from ci.quoting import quoted
from lockstep.documents import DocumentError, document

PERMISSIONS_PATH = "ci/permissions.json"
WRITE_ROLES = frozenset({"admin", "maintain", "write"})


@dataclass(frozen=True)
class Asker:
    """The author of a command, and of the code. `role` is GitHub's permission, `none` for strangers."""

    login: str
    role: str
    author: str
    is_fork: bool


@dataclass(frozen=True)
class Permissions:
    """Commands (without the slash) granted beyond the role, by lower-case login."""

    granted: Mapping[str, frozenset[str]]

    @classmethod
    def load(cls, root: Path) -> "Permissions":
        """Read the file. Raises `CatalogueError`. A missing file grants nothing."""
        path = root / PERMISSIONS_PATH
        if not path.exists():
            return cls({})
        try:
            listed = document(path.read_bytes(), dict[str, list[str]])
        except (OSError, DocumentError) as exc:
            raise CatalogueError(f"{path}: must map logins to lists of commands ({exc})") from exc
        unknown = {f"/{name}" for names in listed.values() for name in names} - set(COMMANDS)
        if unknown:
            raise CatalogueError(f"{path}: no such command: {min(unknown)}; use the names of docs/ci.md")
        return cls({login.lower(): frozenset(names) for login, names in listed.items()})

    def refusal(self, command: Command, asker: Asker) -> str | None:
        """Return why the command is refused and who may give it, or None if it is allowed."""
        if asker.role in WRITE_ROLES:
            return None
        name = name_of(command)
        who = quoted(f"@{asker.login}")
        if asker.is_fork:
            # Running a fork's code on our runners is a question of trust; no list and no authorship replaces it.
            return f"{who} may not give /{name} on a pull request from a fork; people with write permission may"
        if name in self.granted.get(asker.login.lower(), frozenset()):
            return None
        if isinstance(command, TagRunCiLabel | TagAndRerunCi):
            return f"{who} may not give /{name}; people with write permission or an entry in {PERMISSIONS_PATH} may"
        if asker.login.lower() == asker.author.lower():
            return None
        return (
            f"{who} may not give /{name} here; the author of the pull request, people with write permission "
            f"and those listed in {PERMISSIONS_PATH} may"
        )
