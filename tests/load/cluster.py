"""The load run on a Ray cluster of four nodes on this machine, and what happens to its streams when parts of it fail.

Run: ``python tests/load/cluster.py --clients 64 --seconds 60``; ``--placement join`` does without Ray. Prints a table,
and exits with status 1 when anything was not as it must be. Every address is on loopback. With ``--machines`` each
stage has a network namespace of its own, and a link that is cut loses packets in silence.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from load import Load, LoadResult, run_death, run_load
from machines import IN_A_NAMESPACE, MachineStages, Network, inside_a_namespace
from outcome import DEATH_BOUND_S
from rich.console import Console
from rich.table import Table
from scripted_lockstep.script.world import StageLink
from scripted_lockstep.tiers.server.links import order_link
from scripted_lockstep.tiers.server.placed_stages import PlacedStages
from scripted_lockstep.tiers.server.ray_cluster import LocalCluster

from engine.process.control import STAGE_PREFIX
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

STAGES = 4
START_BOUND_S = 400.0
DELAY_S = 0.05
SLOW_STAGE = 2
# Only the cut of a link is noticed by a silence. In the other scenes it would be a stage that got no time on a core.
SILENCE_S = {"cut": ServerSettings().heartbeat_timeout_s}
NO_SILENCE_S = 60.0
# Each node takes the actors of one server at a time, and of one that is ending.
NODE_CPUS = 4
PROMPTS = ("the first", "a second one", "and the third, which is longer than the others are", "x")
NEW_TOKENS = 24

Stages = PlacedStages | MachineStages


@dataclass
class Scene:
    """Where servers run, and for how long they are loaded. ``cluster`` is None for stages that join by themselves.

    With ``network`` each stage is on a machine of it.
    """

    parent: PreloadedParent
    cluster: LocalCluster | None
    clients: int
    seconds: float
    seed: int = 0
    network: Network | None = None
    death_bound_s: float = DEATH_BOUND_S

    @contextlib.contextmanager
    def placed(self) -> Iterator[Stages]:
        with tempfile.TemporaryDirectory() as folder:
            if self.network is not None:
                stages = MachineStages(self.network, Path(folder), STAGES)
            else:
                stages = PlacedStages(Path(folder), STAGES, self.cluster)
            with contextlib.closing(stages) as placed:
                yield placed


def run_scene(scene: Scene, name: str) -> LoadResult:
    """One server under load: left alone ('calm'), on a slow link ('slow'), or with one of ``FAULTS``."""
    with scene.placed() as placed, tempfile.TemporaryDirectory() as folder:
        load = Load(
            parent=scene.parent,
            folder=Path(folder),
            stages=STAGES,
            clients=scene.clients,
            seconds=scene.seconds,
            seed=scene.seed,
            placed=placed,
            silence_s=SILENCE_S.get(name, NO_SILENCE_S),
            death_bound_s=scene.death_bound_s,
            disturb=functools.partial(_slow, placed) if name == "slow" else None,
        )
        if name in ("calm", "slow"):
            return run_load(load)
        fault = functools.partial(FAULTS[name], scene, placed)
        return run_death(load, fault=fault)


def different_tokens(scene: Scene) -> list[str]:
    """The prompts for which the placed stages say something else than one process."""
    with tempfile.TemporaryDirectory() as folder:
        alone = _tokens(scene.parent, Path(folder), None)
    with scene.placed() as placed, tempfile.TemporaryDirectory() as folder:
        there = _tokens(scene.parent, Path(folder), placed)
    return [f"{prompt!r}: {a} and {b}" for prompt, a, b in zip(PROMPTS, alone, there, strict=True) if a != b]


def _tokens(parent: PreloadedParent, folder: Path, placed: Stages | None) -> list[list[int]]:
    where = {} if placed is None else placed.settings | {"pp_size": STAGES, "heartbeat_timeout_s": NO_SILENCE_S}
    process = parent.serve(ServerSettings(port=0, **where), folder, folder / "log")
    try:
        if placed is not None:
            placed.start(parent, process)
        url = process.wait_ready(START_BOUND_S).base_url
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = [{"text": prompt, "sampling_params": sampling} for prompt in PROMPTS]
        return [httpx.post(f"{url}/generate", json=body, timeout=60).json()["output_ids"] for body in bodies]
    finally:
        process.terminate()
        process.wait(START_BOUND_S)
        process.close()


# -- faults: each is given the stages' pids, and returns which stage it hit and for how long that may go unnoticed --


def _kill_actor(scene: Scene, placed: Stages, pids: dict[str, int]) -> tuple[str, float]:
    """The actor on Ray, the agent without."""
    name, pid = next(iter(pids.items()))
    agent = psutil.Process(pid).ppid()
    os.kill(psutil.Process(agent).ppid() if scene.cluster is not None else agent, signal.SIGKILL)
    return name, 0.0


def _kill_node(scene: Scene, placed: Stages, pids: dict[str, int]) -> tuple[str, float]:
    """All processes of a node of Ray that has a stage. Not of the head, with which the cluster ends.

    Ray kills them one after the other, and its workers end when they see that: the fault is the end of the stage.
    """
    assert scene.cluster is not None, "there are no nodes without Ray"
    nodes = {name: scene.cluster.node_of(pid) for name, pid in pids.items()}
    name = next(name for name, node in nodes.items() if scene.cluster.can_lose(node))
    stage, began = psutil.Process(pids[name]), time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(_end_of, stage)
        scene.cluster.kill_node(nodes[name])
        return name, ended.result() - began


def _end_of(process: psutil.Process) -> float:
    process.wait(START_BOUND_S)
    return time.monotonic()


def _cut_link(scene: Scene, placed: Stages, pids: dict[str, int]) -> tuple[str, float]:
    name, pid = next(iter(pids.items()))
    if isinstance(placed, MachineStages):
        placed.network.cut(placed.network.machine_of(pid))
    else:
        order_link(placed.orders_path, StageLink(stage=int(name.removeprefix(STAGE_PREFIX)), is_cut=True))
    return name, SILENCE_S["cut"]


FAULTS: dict[str, Callable[[Scene, Stages, dict[str, int]], tuple[str, float]]] = {
    "actor": _kill_actor,
    "cut": _cut_link,
    "node": _kill_node,
}


def _slow(placed: PlacedStages) -> None:
    order_link(placed.orders_path, StageLink(stage=SLOW_STAGE, delay_s=DELAY_S))


def main() -> None:
    """Run what the flags say and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the calm load, in seconds")
    parser.add_argument("--fault-seconds", type=float, default=8.0, help="load before each fault, in seconds")
    parser.add_argument("--placement", choices=("ray", "join"), default="ray", help="who starts the stages")
    parser.add_argument("--death-bound", type=float, default=DEATH_BOUND_S, help="seconds to the last word of a stream")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that clients do, and of the stage that is hit")
    parser.add_argument("--machines", action="store_true", help="each stage in a network namespace of its own")
    parser.add_argument("--scenes", nargs="+", help="only these of tokens, calm, slow, actor, cut, node")
    flags = parser.parse_args()
    # A slow link needs the relay, and a node needs Ray.
    left_out = {"node"} if flags.placement == "join" else set()
    if flags.machines:
        if flags.placement == "ray":
            parser.error("--machines takes stages that joined by hand: add --placement join")
        left_out.add("slow")
        if not inside_a_namespace():
            os.execvp(IN_A_NAMESPACE[0], [*IN_A_NAMESPACE, sys.executable, *sys.argv])
    scenes = flags.scenes or [name for name in ("tokens", "calm", "slow", *FAULTS) if name not in left_out]
    console, wrong = Console(width=150), 0
    table = Table(title=f"{STAGES} stages, placement {flags.placement}, {flags.clients} clients", title_justify="left")
    for column in ("scene", "requests", "open at the fault", "final message after", "complaints", "load average"):
        table.add_column(column)
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(PreloadedParent.start())
        network = stack.enter_context(contextlib.closing(Network(STAGES))) if flags.machines else None
        cluster = (
            stack.enter_context(contextlib.closing(LocalCluster(STAGES, cpus=NODE_CPUS)))
            if flags.placement == "ray"
            else None
        )
        for name in scenes:
            calm = name in ("calm", "slow")
            seconds = flags.seconds if calm else flags.fault_seconds
            scene = Scene(parent, cluster, flags.clients, seconds, flags.seed, network, flags.death_bound)
            result = (
                LoadResult(STAGES, complaints=different_tokens(scene)) if name == "tokens" else run_scene(scene, name)
            )
            wrong += len(result.complaints)
            cut = (str(result.cut_streams), f"{result.final_message_s:.2f} s") if name in FAULTS else ("", "")
            load = f"{os.getloadavg()[0]:.1f}"
            table.add_row(name, str(len(result.outcomes)), *cut, str(len(result.complaints)), load)
            for complaint in result.complaints[:5]:
                console.print(f"[red]{name}[/red]: {complaint}", highlight=False)
            console.print(f"{name} done, {len(result.complaints)} complaints")
    console.print(table)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
