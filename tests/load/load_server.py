"""The server under load: started from the preloaded parent, asked whether it is idle, ended, checked for leftovers.

Owns what must be true of an idle server, and of one that has ended.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from auditing_gate import AUDITING_GATE
from scripted_lockstep.tiers.server.placed_stages import PlacedStages

from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

# Stages of Ray import everything by themselves, on cores that they share.
START_BOUND_S = 400.0
IDLE_BOUND_S = 30.0
END_BOUND_S = 30.0
POLL_INTERVAL_S = 0.01
CLIENT_TIMEOUT_S = 60.0
# Of the log of a server that does not start, in characters.
SHOWN_LOG = 4000
# KV for a handful of requests of many, so that decode runs out of it and the tree is evicted.
TINY = {
    "max_total_tokens": 2048,
    "page_size": 4,
    "max_running_requests": 14,
    "chunked_prefill_size": 96,
    "schedule_policy": "priority",
    "priority_preemption": True,
    "mixed_chunk": True,
    "kv_sanitizer": True,
}
AT_REST = {"waiting": 0, "chunked": 0, "running": 0, "in_flight": 0, "paused": None, "pages_held": 0}


class LoadedServer:
    """One server with tiny memory and every invariant on. ``complaints`` lists what was wrong."""

    def __init__(
        self, parent: PreloadedParent, folder: Path, placed: PlacedStages | None = None, **settings: Any
    ) -> None:
        self.folder = folder
        where = placed.settings if placed is not None else {}
        given = ServerSettings(**{"port": 0, "gate": AUDITING_GATE, **TINY, **settings, **where})
        self.complaints: list[str] = []
        self.process = parent.serve(given, folder, folder / "log")
        try:
            if placed is not None:
                placed.start(parent, self.process)
            self.serving = self.process.wait_ready(START_BOUND_S)
        except BaseException as exc:
            self.kill()
            log = folder / "log"
            exc.add_note(log.read_text(errors="replace")[-SHOWN_LOG:] if log.exists() else "it has written no log")
            raise
        self._headers = {} if given.api_key is None else {"x-api-key": given.api_key.get_secret_value()}

    def http(self) -> httpx.AsyncClient:
        """A client of this server without a limit of connections."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.serving.base_url, timeout=CLIENT_TIMEOUT_S, limits=limits, headers=self._headers
        )

    async def wait_idle(self, http: httpx.AsyncClient) -> dict[str, Any]:
        """The counters once nothing is left of any request; what is left after a bound is a complaint."""
        deadline = time.monotonic() + IDLE_BOUND_S
        while left := _left(info := (await http.get("/server_info")).json()):
            if time.monotonic() > deadline:
                self.complaints.append(f"not idle {IDLE_BOUND_S} s after the last answer: {', '.join(left)}")
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        return info["stats"]

    def resident_mb(self) -> dict[str, float]:
        """Resident memory of each process in MB."""
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in self.serving.pids.items()}

    def end(self, *, may_say: str | None = None) -> None:
        """Drain and check that nothing is left: processes, port, files, and no line of the log that it may not say."""
        self.process.drain()
        self._check_end(expected_status=0)
        lines = (self.folder / "log").read_text().splitlines()
        if others := [line for line in lines if may_say is None or may_say not in line]:
            self.complaints.append("the log must not say: " + "\n".join(others))
        self._check_folder({"log"})

    def check_death(self) -> None:
        """The end of a server whose process was killed."""
        self._check_end(expected_status=1)
        self._check_folder({"log", "death.json"})

    def kill(self) -> None:
        """Kill the server at once; harmless after its end."""
        self.process.kill()
        self.process.wait(END_BOUND_S)
        self.process.close()

    def _check_end(self, *, expected_status: int) -> None:
        status = self.process.wait(END_BOUND_S)
        if status != expected_status:
            log = (self.folder / "log").read_text()
            self.complaints.append(f"the exit status must be {expected_status}, is {status}; the log says: {log}")
        deadline = time.monotonic() + END_BOUND_S
        while left := [name for name, pid in self.serving.pids.items() if _is_running(pid)]:
            if time.monotonic() > deadline:
                self.complaints.append(f"still running after the end: {left}")
                return
            time.sleep(POLL_INTERVAL_S)
        try:
            httpx.get(f"{self.serving.base_url}/health")
            self.complaints.append("the port still answers after the end")
        except httpx.ConnectError:
            return

    def _check_folder(self, expected: set[str]) -> None:
        names = {path.name for path in self.folder.iterdir()}
        if names != expected:
            self.complaints.append(f"the private folder must hold {sorted(expected)}, holds {sorted(names)}")


def _left(info: dict[str, Any]) -> list[str]:
    """List what keeps a server from being idle and whole, as ``name=value``."""
    stats = info["stats"]
    if stats is None:
        return ["the scheduler does not answer"]
    wanted = AT_REST | {"rows_free": stats["rows_total"], "pages_free": stats["pages_total"] - stats["pages_cached"]}
    left = [f"{name}={stats[name]}" for name, value in wanted.items() if stats[name] != value]
    return left + ([f"open_requests={info['open_requests']}"] if info["open_requests"] else [])


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
