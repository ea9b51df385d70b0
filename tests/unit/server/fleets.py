"""Prefill and decode engines as real servers of the embedded model, and what is left of their requests."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from engine.server.launch.preload import PreloadedParent
from tests.unit.frontend.real_servers import RealServer, running
from tests.unit.router.test_router_on_servers import free_port

# On a busy machine: an engine asks its partners, and they answer, in many turns.
PATIENCE_S = 120.0
# Small parts of prompts, so that pages go out while later ones are computed.
SIZES: dict[str, Any] = {"chunked_prefill_size": 64, "max_total_tokens": 16_384}


class Answer(threading.Thread):
    """A request in a thread of its own: and its answer. ``leave`` hangs up."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self._client = httpx.Client(timeout=PATIENCE_S, trust_env=False)
        self.lines: list[str] = []
        self.status = 0
        self.lost: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._client, self._client.stream("POST", f"{self._url}/generate", json=self._body) as stream:
                self.status = stream.status_code
                for line in stream.iter_lines():
                    self.lines += [line] if line else []
        except (httpx.HTTPError, OSError) as exc:
            self.lost = exc if isinstance(exc, httpx.HTTPError) else httpx.ReadError(str(exc))

    def leave(self) -> None:
        """Hang up without another word."""
        for connection in self._client._transport._pool._connections:  # type: ignore[attr-defined]
            sock = connection._connection._network_stream.get_extra_info("socket")
            sock.shutdown(2)

    def json(self) -> Any:
        self.join(PATIENCE_S)
        assert self.status == 200, (self.status, self.lines, self.lost)
        return httpx.Response(200, text=self.lines[0]).json()


class Fleet:
    """Prefill engines, decode engines that ask them all, and an engine that does all itself."""

    def __init__(self, parent: PreloadedParent, folder: Path, stack: ExitStack, **settings: Any) -> None:
        self._parent, self._folder, self._stack = parent, folder, stack
        self._settings = SIZES | settings
        self._number = 0
        self.prefill_ports: list[int] = []

    def serve(self, **settings: Any) -> RealServer:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        return self._stack.enter_context(running(self._parent, folder, **self._settings | settings))

    def prefill(self, port: int | None = None, **settings: Any) -> RealServer:
        port = free_port() if port is None else port
        self.prefill_ports += [port] if port not in self.prefill_ports else []
        return self.serve(role="prefill", port=port, **settings)

    def decode(self, **settings: Any) -> RealServer:
        urls = ",".join(f"http://127.0.0.1:{port}" for port in self.prefill_ports)
        return self.serve(role="decode", prefill_engines=urls, **settings)


@contextmanager
def fleet_of(parent: PreloadedParent, folder: Path, **settings: Any) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(parent, folder, stack, **settings)


def metric(server: RealServer, name: str) -> float:
    for line in server.metrics().text.splitlines():
        if line.startswith(f"engine_{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no metric {name}")


def left(server: RealServer) -> dict[str, Any]:
    """Return the traces of requests that are left on an engine; empty if there are none."""
    info = server.info()
    numbers = info["stats"]
    at_rest = {
        "waiting": 0,
        "chunked": 0,
        "running": 0,
        "in_flight": 0,
        "alive": 0,
        "open_transfers": 0,
        "pages_held": 0,
    }
    at_rest |= {"rows_free": numbers["rows_total"]}
    found = {name: numbers[name] for name, rest in at_rest.items() if numbers[name] != rest}
    if info["open_requests"]:
        found["open_requests"] = info["open_requests"]
    load = server.load()
    if load["num_reqs"] or load["free_pages"] + load["cached_pages"] != load["total_pages"]:
        found["load"] = load
    return found


def until(true: Callable[[], object], what: str = "", every_s: float = 0.01) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"this did not become true within {PATIENCE_S:g} s: {what}"
        time.sleep(every_s)


def until_asked(decode: RealServer) -> None:
    """Wait until some prefill engine takes its prompts. Each look costs five requests, and it looks once a second."""
    until(lambda: is_asked(decode), f"{decode.url} asks a prefill engine", every_s=0.2)


def nothing_is_left(*servers: RealServer) -> None:
    """Wait until nothing is left of any request on these."""
    for server in servers:
        deadline = time.monotonic() + PATIENCE_S
        while found := left(server):
            assert time.monotonic() < deadline, f"{server.url}: {found}"
            time.sleep(0.02)


def is_asked(decode: RealServer) -> bool:
    """Whether some prefill engine takes prompts: one that is asked for answers."""
    before = metric(decode, "prefills_asked_total"), metric(decode, "prefills_failed_total")
    ids = [*time.monotonic_ns().to_bytes(8, "big"), *range(1, 40)]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    decode.http.post("/generate", json=body).raise_for_status()
    asked, failed = metric(decode, "prefills_asked_total"), metric(decode, "prefills_failed_total")
    return asked > before[0] and failed == before[1]


def signal_all(server: RealServer, number: signal.Signals) -> None:
    """Send a signal to each process of a server's engine."""
    for pid in server.serving.pids.values():
        with contextlib.suppress(ProcessLookupError):  # One that dies may take the others along.
            os.kill(pid, number)
