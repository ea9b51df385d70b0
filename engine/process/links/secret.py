"""The secret of one run, shared by every machine of the engine: made, read from a file, written to one.

It appears nowhere: not in arguments, not in logs, not when printed by mistake.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from engine.core.errors import ConfigError

MAC_BYTES: Final = 32
MIN_SECRET_CHARS: Final = 16
_NEW_SECRET_BYTES: Final = 32
_MAX_SECRET_BYTES: Final = 4096


class Secret:
    """The key of a run. Its text leaves it by ``write`` alone."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        """Raises ConfigError for a text that is short enough to be guessed."""
        if len(text) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"the run's secret must have at least {MIN_SECRET_CHARS} characters, got {len(text)}; make one with "
                "`openssl rand -hex 32`"
            )
        self._text = text

    @classmethod
    def new(cls) -> Secret:
        return cls(secrets.token_hex(_NEW_SECRET_BYTES))

    def mac(self, *parts: bytes) -> bytes:
        """Return the code of these parts, which only a holder of the secret can make. The parts have fixed lengths."""
        return hmac.digest(self._text.encode(), b"".join(parts), "sha256")

    def is_mac(self, mac: bytes, *parts: bytes) -> bool:
        """True if this is the code of these parts; the time taken does not tell where it differs."""
        return hmac.compare_digest(self.mac(*parts), mac)

    def write(self, path: Path) -> None:
        """Write it to a file that only this user can read, in place of any older one."""
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as target:
            target.write(f"{self._text}\n")

    def __repr__(self) -> str:
        return "Secret(...)"


def read_secret(path: Path) -> Secret:
    """Read the secret from a file, without surrounding white space. Raises ConfigError if there is none.

    Refuses a file that other users can read. A pipe or a terminal is taken as it is.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"the secret file must be its owner's alone, got mode {stat.S_IMODE(mode):o} of {path}; "
                    f"run `chmod 600 {path}`"
                )
            text = file.read(_MAX_SECRET_BYTES).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"the secret file must be readable text, but {path} is not ({exc}); copy the file that `engine serve` names"
        ) from exc
    return Secret(text.strip())
