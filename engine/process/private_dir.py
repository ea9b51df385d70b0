"""The server's private folder: the one place where the sockets between its processes live.

Owns the folder's permissions, the names of the front end's sockets in it, and what is left of it at the end. Everything
else that needs an address in it appends a short name of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine.core.errors import StartupError

# A Unix socket's path may have 107 bytes; the longest name that a process adds is shorter than this.
MAX_PATH_BYTES = 85
# The processes start in any order, and a socket may be connected before it is bound. zmq's own pause between attempts
# would hold up the first message for longer than a start takes.
RECONNECT_INTERVAL_MS = 5
# Where the stages note how far they are.
PROGRESS_FILE = "progress"
# What stages on other machines prove themselves with.
SECRET_FILE = "secret"  # noqa: S105 - a name
# What the names of files end with in which stages note where they take KV.
ADDRESS_SUFFIX = ".address"


def requests_address(private_dir: Path) -> str:
    return f"ipc://{private_dir}/requests"


def replies_address(private_dir: Path) -> str:
    return f"ipc://{private_dir}/replies"


class PrivateDir:
    """A folder that only this user may enter: made here and removed at the end, or lent by the caller and left."""

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
        """Remove the folder, or from a lent one what the processes made there: killed ones cannot remove it."""
        if not self.lent:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.is_socket() or path.name in (PROGRESS_FILE, SECRET_FILE) or path.suffix == ADDRESS_SUFFIX:
                path.unlink(missing_ok=True)
