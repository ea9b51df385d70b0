"""The limit of open files: what a server needs at least, looked at before anything is started.

Owns the number. With too few a server would die in the middle of its imports, or refuse its first clients.
"""

from __future__ import annotations

import resource

from engine.errors import StartupError

# Imports, sockets between processes and the listener took 20 at the most in one process; the rest is for clients.
LEAST_FOR_A_PROCESS = 64
# The scheduler has a socket to each stage, and one on which it listens for it; the supervisor a pipe.
FOR_A_STAGE = 2


def least_descriptors(pp_size: int) -> int:
    """Files that each process of a server must be able to open."""
    return LEAST_FOR_A_PROCESS + FOR_A_STAGE * pp_size


def require_descriptors(pp_size: int) -> None:
    """Raise StartupError when this process, and so its children, may open too few files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = least_descriptors(pp_size)
    if limit != resource.RLIM_INFINITY and limit < least:
        raise StartupError(
            f"a server of {pp_size} stages must be able to open {least} files in each process, the limit is {limit}; "
            f"raise it, with `ulimit -n {least}` or more"
        )
