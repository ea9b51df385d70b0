"""How a command ends when its user interrupts it: one line on stderr and exit status 130, from its first import on.

Imports nothing that takes time, so that the costly imports can be made inside. Never cleans up: what a command has
started is ended by who has started it, on the way here.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# As shells count a process that SIGINT has ended.
EXIT_INTERRUPTED: Final = 130


@contextmanager
def interruptible(command: str) -> Iterator[None]:
    """Run a command of this name, its imports included. Raises SystemExit when Ctrl-C ends it."""
    try:
        yield
    except KeyboardInterrupt:
        _tell(command)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except SystemExit as exc:
        # The library of the command line ends an interrupted command with this status, and without a word.
        if exc.code == EXIT_INTERRUPTED:
            _tell(command)
        raise


def _tell(command: str) -> None:
    # All is cleaned up. A second Ctrl-C would only break the interpreter's end with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write(f"{command}: interrupted\n")
