"""The control pipe between the supervisor and each of its processes: its messages, and the child's end of it.

Carries typed msgpack messages, never pickle, and no client's request. End of file means that the process at the other
end is gone.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from engine.core.errors import EngineError, ProcessDiedError
from engine.core.frames import BadFrameError, decoder_of
from engine.process.links.endpoint import Endpoint

SUPERVISOR = "supervisor"
# The name of a stage's process begins so; the stage's number follows.
STAGE_PREFIX = "stage-"
MAX_TRACEBACK_CHARS = 32_768
MAX_ERROR_CHARS = 8_192
# Room for two tracebacks at four bytes a character; a frame that claims to be longer is damaged.
MAX_CONTROL_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process has loaded everything and is ready for work. A process that failed never sends it.

    ``about`` has facts for the operator, by name.
    """

    about: dict[str, str] = {}


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process's progress in loading its part of the model, with its device and dtype.

    ``doing`` names the phase; ``done`` of ``total`` tensors are read, both 0 in all other phases.
    """

    done: int
    total: int
    device: str
    dtype: str
    doing: str = "reading"


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The front end's answer to Drain: no request is live any longer, and none will arrive."""


class Dying(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process is about to end because of an exception.

    ``error`` is the exception in one line; with ``expected`` it is one of the engine's own errors, whose text,
    ``refusal``, is enough for a user. ``victim_of`` names the process whose death caused it, if any, and
    ``victim_cause`` is the known cause of that death.
    """

    error: str
    traceback: str
    expected: bool = False
    victim_of: str | None = None
    victim_cause: str = ""
    refusal: str = ""

    @classmethod
    def of(cls, exc: BaseException) -> Dying:
        """Describe an exception. A long traceback loses its beginning, because the error is at the end."""
        text = "".join(traceback.format_exception(exc))
        return cls(
            error="".join(traceback.format_exception_only(exc)).strip()[:MAX_ERROR_CHARS],
            traceback=text[-MAX_TRACEBACK_CHARS:],
            expected=isinstance(exc, EngineError),
            refusal=str(exc)[:MAX_ERROR_CHARS] if isinstance(exc, EngineError) else "",
            victim_of=exc.process if isinstance(exc, ProcessDiedError) else None,
            victim_cause=exc.cause[-MAX_TRACEBACK_CHARS:] if isinstance(exc, ProcessDiedError) else "",
        )


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every process is ready: the server is open at ``base_url``. ``pids`` are the engine's processes by name.

    ``nodes`` are the machines of processes on other machines.
    """

    base_url: str
    pids: dict[str, int]
    nodes: dict[str, str] = {}


class Gathering(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The server waits for stages to join at ``join``; the file holds the secret."""

    join: Endpoint
    secret_file: str
    stages: int


class ProcessDied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A process of the engine died, and the server is about to end. ``cause`` is its traceback, signal or status.

    ``node`` is the name of its machine, empty for the server's own.
    """

    process: str
    cause: str
    node: str = ""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tells the front end to refuse new requests, finish live ones and answer Drained. A Shutdown may come first."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tells a process to shut down cleanly; no process has died."""


ChildMessage = Ready | Loading | Drained | Dying
SupervisorMessage = Serving | ProcessDied | Drain | Shutdown

# Both decoders raise BadFrameError for anything else.
decode_child_message: Callable[[bytes], ChildMessage] = decoder_of(ChildMessage)
_supervisor_message_of: Callable[[bytes], SupervisorMessage] = decoder_of(SupervisorMessage)


class Control:
    """A process's end of its control pipe. ``fileno()`` is readable when the supervisor has sent a message or is gone.

    ``is_cut`` is set once the supervisor is gone; the process then skips its cleanup.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_dying = False
        self.is_cut = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ChildMessage) -> None:
        """Send the supervisor a message. Raises nothing if the supervisor is gone: the next receive() does."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            return

    def report_death(self, exc: BaseException) -> None:
        """Send the exception that ends this process, once.

        A process sends it before it closes its connections, because their loss ends others, which blame this process.
        """
        if not self._is_dying:
            self._is_dying = True
            self.send(Dying.of(exc))

    def receive(self, timeout_s: float | None = None) -> SupervisorMessage | None:
        """Return the next message; None after ``timeout_s`` seconds (None: no limit), or for a damaged frame.

        Raises ProcessDiedError when the supervisor is gone.
        """
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                return None
            return _supervisor_message_of(self._connection.recv_bytes(MAX_CONTROL_BYTES))
        except BadFrameError as exc:
            logger.warning("dropped a frame that is not a message of the supervisor: %s", exc)
            return None
        except (EOFError, OSError) as exc:
            self.is_cut = True
            raise ProcessDiedError(SUPERVISOR, "its control pipe closed without a shutdown message") from exc

    def wait_until_serving(self, timeout_s: float) -> Serving:
        """Wait for the supervisor's message that every process is ready.

        Raises ProcessDiedError if one dies first, TimeoutError after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = self.receive(left_s)
            if message is None:
                continue
            if isinstance(message, Serving):
                return message
            if isinstance(message, ProcessDied):
                raise ProcessDiedError(message.process, message.cause, message.node)
            raise ProcessDiedError(SUPERVISOR, "the server was shut down before every process was ready")
        raise TimeoutError(f"not every process was ready within {timeout_s} s; the supervisor's log names which")

    def close(self) -> None:
        """Close this end, which tells the supervisor that this process has ended."""
        self._connection.close()
