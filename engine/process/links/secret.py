"""The secret of one run, shared by every machine of the engine: creates it, reads it from a file, writes it to one.

It never appears in arguments, in logs, or in a ``repr``.
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
    """The key of a run. Only ``write`` reveals its text."""

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
        """Return the MAC of these parts, which need the secret. The parts have fixed lengths."""
        return hmac.digest(self._text.encode(), b"".join(parts), "sha256")

    def is_mac(self, mac: bytes, *parts: bytes) -> bool:
        """Return whether this is the MAC of these parts, in constant time."""
        return hmac.compare_digest(self.mac(*parts), mac)

    def write(self, path: Path) -> None:
        """Write it to a file that only this user can read, replacing any older one."""
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as target:
            target.write(f"{self._text}\n")

    def __repr__(self) -> str:
        return "Secret(...)"


def read_secret(path: Path) -> Secret:
    """Read the secret from a file, without surrounding white space. Raises ConfigError if there is none.

    Refuses a file that other users can read, but accepts any pipe or terminal.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"the secret file must be accessible to its owner only, got mode {stat.S_IMODE(mode):o} of "
                    f"{path}; run `chmod 600 {path}`"
                )
            text = file.read(_MAX_SECRET_BYTES).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"the secret file must be readable text, but {path} is not ({exc}); copy the file that `engine serve` names"
        ) from exc
    return Secret(text.strip())
