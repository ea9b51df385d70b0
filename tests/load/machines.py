"""Machines for tests: network namespaces of this process's own, joined by a bridge, whose links can go down.

A packet for a machine whose link is down is lost without a word, as on a real network. Nothing here reaches the network
of the host, and nothing of it is left when the processes have ended. Needs Linux, iproute2 and util-linux, and a kernel
that lets a user make namespaces; the process must be in one, see ``inside_a_namespace``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

from engine.server.launch.preload import PreloadedParent, ServerProcess

# What a command is prefixed with, so that it is root of a user namespace with an empty network.
IN_A_NAMESPACE: Final = ("unshare", "--user", "--map-root-user", "--net")
BRIDGE: Final = "machines"
SERVER: Final = "10.77.0.254"
GATHERING_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 10.0


def why_no_namespace() -> str | None:
    """Why namespaces cannot be had here; None where they can."""
    for tool in ("unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    tried = subprocess.run(
        [*IN_A_NAMESPACE, "ip", "link", "add", "name", "a", "type", "veth", "peer", "name", "b"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"the kernel refuses: {tried.stderr.strip()}"


def inside_a_namespace() -> bool:
    """Whether this process has a network of its own: nothing but loopback, and that is down."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    return len(links) == 1 and links[0].split()[:2] == ["lo", "DOWN"]


class Network:
    """``machines`` network namespaces on a bridge, and the server's at its end, which is this process's own."""

    def __init__(self, machines: int) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            _ip("link", "set", "lo", "up")
            _ip("link", "add", "name", BRIDGE, "type", "bridge")
            _ip("address", "add", f"{SERVER}/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for number in range(machines):
                self._add(number)
            stack.pop_all()

    def address_of(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def on(self, machine: int) -> list[str]:
        """Return the prefix of a command that runs it on a machine."""
        return ["nsenter", "--net", "--target", str(self._holders[machine].pid)]

    def machine_of(self, pid: int) -> int:
        """The machine on which a process runs."""
        return [_net_of(holder.pid) for holder in self._holders].index(_net_of(pid))

    def cut(self, machine: int) -> None:
        """Lose every packet from and to a machine from now on."""
        _ip("link", "set", f"to-{machine}", "down")

    def heal(self) -> None:
        """Deliver packets again, of all machines."""
        for machine in range(len(self._holders)):
            _ip("link", "set", f"to-{machine}", "up")

    def close(self) -> None:
        """Give the machines back; the kernel removes what nothing uses any more."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._holders = []

    def _add(self, number: int) -> None:
        holder = subprocess.Popen(["unshare", "--net", "setpriv", "--pdeathsig", "KILL", "sleep", "infinity"])
        self._holders.append(holder)
        while _net_of(holder.pid) == _net_of(os.getpid()):
            time.sleep(0.001)
        _ip("link", "add", "name", f"to-{number}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _ip("link", "set", f"to-{number}", "master", BRIDGE, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{self.address_of(number)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            subprocess.run([*self.on(number), "ip", *command], check=True)


class MachineStages:
    """The stages of one server, joined by hand, each on a machine of ``network``."""

    def __init__(self, network: Network, folder: Path, stages: int) -> None:
        self.network = network
        self._folder = folder
        self._stages = stages
        self._agents: list[subprocess.Popen[bytes]] = []

    @property
    def settings(self) -> dict[str, Any]:
        """The server's, as far as they say where its stages are."""
        return {"placement": "join", "stage_listen": f"{SERVER}:0"}

    def start(self, parent: PreloadedParent, server: ServerProcess) -> None:
        """Start the agents once the server takes them. ``parent`` forks none of them: it is on the server's machine."""
        gathering = server.wait_gathering(GATHERING_TIMEOUT_S)
        environment = os.environ | {"TMPDIR": str(self._folder)}
        for stage in range(self._stages):
            command = [
                *self.network.on(stage),
                *(sys.executable, "-m", "engine", "stage", "--join", str(gathering.join), "--stage", str(stage)),
                *("--secret-file", gathering.secret_file, "--node", f"machine-{stage}"),
            ]
            with (self._folder / "agents.log").open("ab") as log:
                self._agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def close(self) -> None:
        self.network.heal()
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(END_TIMEOUT_S)
        _kill(self._agents)


def _net_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _kill(started: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes and all that they have started."""
    family = [one for process in started for one in _family(process.pid)]
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    for process in started:
        process.wait()
    psutil.wait_procs(family, timeout=END_TIMEOUT_S)


def _family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        yield from process.children(recursive=True)
        yield process
