"""The server's private folder, which holds the sockets between its processes.

Owns the folder's permissions, the names of the front end's sockets, and the removal at the end. All other users append
a short name of their own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine.core.errors import StartupError

# A Unix socket's path may have 107 bytes; this leaves room for the longest name that a process appends.
MAX_PATH_BYTES = 85
# The processes start in any order, so a socket may be connected before it is bound. zmq's default pause between
# attempts would delay the first message for longer than a start takes.
RECONNECT_INTERVAL_MS = 5
# The file of the stages' progress.
PROGRESS_FILE = "progress"
# The file with the secret of stages on other machines.
SECRET_FILE = "secret"  # noqa: S105 - a name
# Suffix of the files that announce a stage's KV address.
ADDRESS_SUFFIX = ".address"


def requests_address(private_dir: Path) -> str:
    return f"ipc://{private_dir}/requests"


def replies_address(private_dir: Path) -> str:
    return f"ipc://{private_dir}/replies"


class PrivateDir:
    """A folder that only this user may enter: created here and removed at the end, or lent by the caller and kept."""

    def __init__(self, lent: Path | None = None) -> None:
        self.lent = lent is not None
        self.path = lent.absolute() if lent is not None else Path(tempfile.mkdtemp(prefix="engine-"))
        if len(bytes(self.path)) > MAX_PATH_BYTES:
            self.remove()
            raise StartupError(
                f"the server's private folder must have a path of at most {MAX_PATH_BYTES} bytes, because it holds "
                f"Unix sockets, got {len(bytes(self.path))} ({self.path}); set TMPDIR to a shorter one"
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.path.chmod(0o700)

    def remove(self) -> None:
        """Remove the folder, or from a lent one the processes' files, which killed processes leave behind."""
        if not self.lent:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.is_socket() or path.name in (PROGRESS_FILE, SECRET_FILE) or path.suffix == ADDRESS_SUFFIX:
                path.unlink(missing_ok=True)
