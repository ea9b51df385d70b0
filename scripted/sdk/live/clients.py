"""A client of a live engine: one HTTP call to its front end, in a thread that only fills in what it receives."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

from scripted.sdk.live.stops import LoopGate

_OK: Final = 200
_DATA: Final = b"data: "


class HttpCall:
    """A POST. ``status`` is None until it arrives; ``closed`` turns true once nothing more can arrive.

    ``token_ids`` are the received tokens of a streamed completion, which ``read`` extracts from a chunk; ``text`` is
    the body of any other answer.
    """

    def __init__(
        self,
        gate: LoopGate,
        port: int,
        path: str,
        body: Mapping[str, object],
        *,
        rid: str = "",
        read: Callable[[list[int], Any], list[int]] | None = None,
    ) -> None:
        self.status: int | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.closed = False
        self._gate = gate
        self._read = read
        self._http = HTTPConnection("127.0.0.1", port)
        headers = {"Content-Type": "application/json", **({"X-Request-Id": rid} if rid else {})}
        self._http.connect()
        self._http.request("POST", path, json.dumps(body), headers)
        threading.Thread(target=self._listen, name="scripted-client", daemon=True).start()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # its end has already been read
            self._http.sock.shutdown(socket.SHUT_RDWR)

    @property
    def ok(self) -> bool:
        """Whether the answer was a success."""
        return self.status == _OK

    def _listen(self) -> None:
        with contextlib.suppress(OSError, HTTPException, ValueError, AttributeError):  # the client has hung up
            answer = self._http.getresponse()
            self.status = answer.status
            if not self.ok or "event-stream" not in answer.headers.get("Content-Type", ""):
                self.text = answer.read().decode("utf-8", "replace")
            else:
                for line in answer:
                    self._hear(line.strip())
        self._http.close()
        self.closed = True
        self._gate.notify()

    def _hear(self, line: bytes) -> None:
        if not line.startswith(_DATA + b"{") or self._read is None:
            return
        chunk = json.loads(line.removeprefix(_DATA))
        if "error" in chunk:
            self.text = chunk["error"]["message"]
        else:
            self.token_ids = self._read(self.token_ids, chunk)
        self._gate.notify()
