"""The server of one replica: started in processes of its own, and ended with the replica, however that ends.

Owns the parent process, the private folder and the order of the end. The parent is a fresh process, because one that
Ray has started has threads, and a fork takes none of them along.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final, Self

from engine.errors import StartupError
from engine.launch.preload import PreloadedParent
from engine.settings import ServerSettings

# Where this process's stderr goes, as a path: Ray keeps it in a log file of the replica, and the server's with it.
_LOG: Final = Path("/proc/self/fd/2")
# What processes need to end after the live requests have.
_GRACE_S: Final = 5.0


class OwnServer:
    """A running server. A context manager; ``close()`` ends it and removes its folder."""

    def __init__(self, settings: ServerSettings) -> None:
        """Start it and wait until it is ready. Raises StartupError, with the cause."""
        self._parent = PreloadedParent.start()
        # From the order on the parent removes it, should this process be killed.
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))
        if settings.radix_cache:
            ends = {f"kv_events{end}": f"ipc://{self._folder}/kv{end}" for end in ("_endpoint", "_replay_endpoint")}
            settings = settings.model_copy(update={"kv_events": True, **ends})
        self._settings = settings
        try:
            self._server = self._parent.serve(settings, self._folder, _LOG, remove_private_dir=True)
            serving = self._server.wait_ready(settings.start_timeout_s)
        except TimeoutError as exc:
            self._end()
            raise StartupError(
                f"an engine must be ready within start_timeout_s={settings.start_timeout_s}, but was not; raise it"
            ) from exc
        except BaseException:
            self._end()
            raise
        self.base_url = serving.base_url
        self.pids = serving.pids

    @property
    def kv_endpoints(self) -> tuple[str, str]:
        """Where its KV events are published and asked for again, on this node; empty where there are none."""
        return self._settings.kv_events_endpoint, self._settings.kv_events_replay_endpoint

    def fileno(self) -> int:
        """Readable when the server is gone."""
        return self._server.fileno()

    def drain(self) -> None:
        """Let live requests end, within the server's own bound; take no more. Returns when it has ended."""
        self._server.drain()
        try:
            self._server.wait(self._settings.drain_timeout_s + _GRACE_S)
        except TimeoutError:
            self._server.kill()

    def close(self) -> None:
        """End the server, at once if it was not drained. Idempotent."""
        self._server.close()
        self._end()

    def _end(self) -> None:
        self._parent.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
