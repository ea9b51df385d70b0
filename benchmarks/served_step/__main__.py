"""The CPU time of a served step by part: gate, scheduler, tables, forward, sampling, replies, text, HTTP.

CPU time, so that it can be measured on a busy machine; several source trees take turns, round by round. Timing adds
about a microsecond to each call of a part. Run: ``python -m benchmarks.served_step [--tree OTHER]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.machine import Machine
from benchmarks.measurement import in_turn, output_file
from benchmarks.peers.results import CLIENTS
from benchmarks.peers.served import Load, Served, ServedPeer
from benchmarks.processes import process_cpu_s
from benchmarks.served_step.probed_server import PARTS, marks_of
from lockstep.interruption import interruptible

_ROOT: Final = Path(__file__).parents[2]
_SERVER: Final = Path(__file__).with_name("probed_server.py")
_KV_TOKENS: Final = {"S": 131_072, "M": 8_192}
_WORKLOADS: Final = {"S": Load(output_tokens=64, requests_a_client=2), "M": Load(output_tokens=16, requests_a_client=1)}
_PROCESSES: Final = ("scheduler", "frontend")
_NAME_BYTES: Final = 15
_STEP: Final = next(index for index, part in enumerate(PARTS) if part.name == "forward")
_RESULTS: Final = Path("out/served_step.json")
_REST: Final = "the rest: event loop, other threads, collecting garbage"


class Spent(msgspec.Struct):
    """CPU of one round: microseconds a step by process and part, and the numbers of steps and tokens."""

    steps: int
    tokens: int
    parts_us: dict[str, float]


class ProbedServer:
    """A server of one source tree, with its measurements: a list of rounds for each number of clients."""

    def __init__(self, name: str, tree: Path, folder: Path, scratch: Path, options: Sequence[str]) -> None:
        self.name = name
        self.rounds: dict[int, list[Spent]] = {clients: [] for clients in CLIENTS}
        marks = scratch / f"{name}.marks"
        self._marks = marks_of(marks)
        command = (sys.executable, str(_SERVER), str(marks), "serve", "--model", str(folder), *options)
        environment = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(scratch / f"{name}-cache")}
        peer = ServedPeer(name=name, command=command, environment=environment, working_folder=tree)
        self.server = Served(peer, folder, scratch / f"{name}.log")
        self._processes = dict(self._named_processes())

    def measure(self, clients: int, work: Load, seed: int) -> None:
        """Measure one round with this number of clients."""
        marks, cpu_s = self._marks.tolist(), self._cpu_s()
        self.server.throughput(clients, work, seed)
        spent = [after - before for before, after in zip(marks, self._marks.tolist(), strict=True)]
        steps = max(1, spent[2 * _STEP])
        parts_us: dict[str, float] = {}
        for process, before in cpu_s.items():
            rest = (self._cpu_s()[process] - before) * 1e6
            for index, part in enumerate(PARTS):
                if part.process == process:
                    microseconds = spent[2 * index + 1] / 1e3
                    parts_us[f"{process}: {part.name}"] = microseconds / steps
                    rest -= microseconds
            parts_us[f"{process}: {_REST}"] = rest / steps
        tokens = clients * work.requests_a_client * work.output_tokens
        self.rounds[clients].append(Spent(steps=steps, tokens=tokens, parts_us=parts_us))

    def _cpu_s(self) -> dict[str, float]:
        return {name: process_cpu_s(process) for name, process in self._processes.items()}

    def _named_processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Return the engine's processes by role, from their names as far as the kernel keeps them."""
        for process in self.server.family.members():
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
            for wanted in _PROCESSES:
                if name == f"engine-{wanted}"[:_NAME_BYTES]:
                    yield wanted, process


def main() -> None:
    """Start a server for each tree, load them in turns, and print a table for each number of clients."""
    arguments = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    machine = Machine.here()
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint(arguments.dtype, arguments.shape))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ("--max-total-tokens", str(_KV_TOKENS[arguments.shape]), "--backend", arguments.backend)
        trees = [("this tree", _ROOT), *((tree.name, tree.absolute()) for tree in arguments.tree)]
        servers = []
        for name, tree in trees:
            console.print(f"starting: {name}")
            server = ProbedServer(name, tree, folder, scratch, (*options, *arguments.option))
            stack.callback(server.server.family.stop)
            server.server.warm_up()
            servers.append(server)
        for number in range(arguments.rounds):
            for clients in CLIENTS:
                for server in in_turn(servers, number):
                    server.measure(clients, _WORKLOADS[arguments.shape], seed=1000 * number + clients)
    console.print(f"{arguments.shape}, {arguments.dtype}, {arguments.backend}; {machine}, {os.getloadavg()[0]:g} after")
    for clients in CLIENTS:
        console.print(_table(servers, clients))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    numbers = {server.name: server.rounds for server in servers}
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(numbers)) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served_step", description=__doc__)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another source tree; may be repeated")
    parser.add_argument("--backend", choices=("openvino", "torch"), default="openvino")
    parser.add_argument("--option", action="append", default=[], help="one more word for `engine serve`, of all trees")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="S")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=output_file, default=_RESULTS, help="where the numbers go")
    return parser.parse_args()


def _table(servers: Sequence[ProbedServer], clients: int) -> Table:
    steps = [statistics.median(spent.steps for spent in server.rounds[clients]) for server in servers]
    shown = ", ".join(f"{count:g} steps a round" for count in steps)
    table = Table("CPU us a step, median (min)", title=f"{clients} clients, {shown}")
    for server in servers:
        table.add_column(server.name, justify="right")
    for name in servers[0].rounds[clients][0].parts_us:
        table.add_row(name, *(_shown([spent.parts_us[name] for spent in server.rounds[clients]]) for server in servers))
    table.add_section()
    totals = [[sum(spent.parts_us.values()) for spent in server.rounds[clients]] for server in servers]
    table.add_row("all", *map(_shown, totals))
    tokens = [
        [sum(spent.parts_us.values()) * spent.steps / spent.tokens for spent in server.rounds[clients]]
        for server in servers
    ]
    table.add_row("all, for each token", *map(_shown, tokens))
    return table


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f})"


if __name__ == "__main__":
    with interruptible("benchmarks.served_step"):
        main()
