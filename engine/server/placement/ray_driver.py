"""The driver: the process that talks to Ray for the supervisor. ``python -m engine.server.placement.ray_driver FD FD``.

Connects to a cluster or starts one, reserves a bundle for each stage, runs an actor in each bundle, and removes all of
it at the end. Neither computes nor carries requests. Keeps Ray's threads out of every other process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from engine import __version__
from engine.core.errors import PlacementError
from engine.process.control import Control, Ready, Serving
from engine.process.death import EXIT_FAILED
from engine.process.links.endpoint import Endpoint, parse_endpoint
from engine.process.logs import configure_logging
from engine.process.settings import ServerSettings
from engine.process.signals import STACK_SIGNAL, leave_stops_to_the_supervisor
from engine.server.placement.ray_actor import AgentEnd, Place, StageHost
from engine.server.placement.ray_order import NICENESS, RAY, RayOrder
from lockstep.output_files import keep_private
from lockstep.process_control import name_process

LOOPBACK: Final = "127.0.0.1"
LOCAL: Final = "local"
CONNECT_TIMEOUT_S: Final = 10.0
# The interval, in seconds, at which a wait for a placement checks whether the supervisor still wants it.
LOOK_INTERVAL_S: Final = 1.0
# The driver times out before the supervisor does, because its error says more.
HEADSTART_S: Final = 1.0
# The server listens already, so an agent that cannot reach it by then never will.
AGENT_TIMEOUT_S: Final = 60.0
# The time for agents to end before their actors are killed.
AGENTS_GRACE_S: Final = 0.3
RAY_GRACE_S: Final = 5.0

logger = logging.getLogger(__name__)


def main(control_fd: int, order_fd: int) -> None:
    """Place the stages, hold them until the supervisor ends the server or is gone, and remove everything."""
    # The supervisor ends this process by its pipe, or kills it if that takes too long. A signal that a terminal or
    # `timeout` sends to the process group would first end the processes of our cluster.
    os.setsid()
    keep_private()
    leave_stops_to_the_supervisor()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    current_process().name = RAY
    name_process(RAY)
    control = Control(Connection(control_fd))
    with open(order_fd, "rb") as pipe:
        order = msgspec.json.decode(pipe.read(), type=RayOrder)
    settings = ServerSettings.model_validate_json(order.settings)
    configure_logging(settings)
    status = 0
    try:
        with _connected(settings, order.temp_dir), _placed(order, settings, control) as stages:
            control.send(Ready(about={RAY: str(stages)}))
            stages.watch(control)
    except BaseException as exc:  # noqa: BLE001 - any exception that ends this process is reported as the cause
        control.report_death(exc)
        status = EXIT_FAILED
    finally:
        sys.stderr.flush()
        # Skips the join of Ray's threads, which would keep this process alive.
        os._exit(status)


class _Stages:
    """The actors of all stages, and for each the pending call of ``run``, which lasts as long as its agent."""

    def __init__(self, ray: Any, actors: Sequence[Any], places: Sequence[Place]) -> None:
        self._ray = ray
        self._actors = actors
        self._places = places
        self._runs: list[Any] = []

    def __str__(self) -> str:
        return ", ".join(f"stage {stage} on {place}" for stage, place in enumerate(self._places))

    def start(self, order: RayOrder) -> None:
        secret = Path(order.secret_file).read_text().strip()
        for stage, (actor, place) in enumerate(zip(self._actors, self._places, strict=True)):
            known = {"stage": stage, "node": place.name, "address": place.address, "timeout_s": AGENT_TIMEOUT_S}
            self._runs.append(actor.run.remote(msgspec.structs.replace(order.stages[stage], **known), secret))

    def watch(self, control: Control) -> None:
        """Wait until the supervisor orders the end. Raises PlacementError if an agent ends before the server serves.

        After that the supervisor notices an agent's end by its connection; this only logs Ray's information about it.
        """
        ended, wakeup = os.pipe()
        threading.Thread(target=self._await_end, args=(wakeup,), name="actors", daemon=True).start()
        sources = [control.fileno(), ended]
        serving = False
        while True:
            ready = wait(sources)
            if control.fileno() in ready:
                message = control.receive()
                serving = serving or isinstance(message, Serving)
                if message is not None and not isinstance(message, Serving):
                    return
            if ended in ready:
                sources.remove(ended)
                self._tell_end(serving)

    def kill(self) -> None:
        """Kill the remaining actors, after giving their agents a moment to end."""
        self._ray.wait(self._runs, num_returns=len(self._runs), timeout=AGENTS_GRACE_S)
        for actor in self._actors:
            self._ray.kill(actor)

    def _await_end(self, wakeup: int) -> None:
        self._ray.wait(self._runs, num_returns=1)
        os.close(wakeup)

    def _tell_end(self, serving: bool) -> None:
        done, _ = self._ray.wait(self._runs, num_returns=1, timeout=0)
        stage = self._runs.index(done[0])
        place = self._places[stage]
        try:
            end: AgentEnd = self._ray.get(done[0])
        except self._ray.exceptions.RayError as exc:
            # The supervisor sees only a closed connection; Ray may know why.
            logger.warning("Ray lost the actor of stage %s on %s: %s", stage, place, exc)
            if not serving:
                why = " ".join(str(exc).split())
                raise PlacementError(
                    f"the actor of stage {stage} on {place} died before the server was open; Ray says: {why}"
                ) from exc
            return
        if not serving:
            last = "; its last lines: " + " | ".join(end.said) if end.said else ""
            raise PlacementError(f"the agent of stage {stage} on {place} ended with status {end.status}{last}")


# -- the cluster --


@contextlib.contextmanager
def _connected(settings: ServerSettings, temp_dir: str) -> Iterator[None]:
    """Connect to the cluster in the settings, else to a running one, else to a new one that ends with the block."""
    import ray

    started_here = not _connect(ray, settings.ray_address)
    if started_here:
        _start(ray, settings, temp_dir)
    leave_stops_to_the_supervisor()  # Replaces Ray's signal handlers, which end the process.
    try:
        yield
    finally:
        ours = _processes_of(temp_dir) if started_here else []
        ray.shutdown()
        # ray.shutdown returns before Ray's processes have ended.
        _, left = psutil.wait_procs(ours, timeout=RAY_GRACE_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _connect(ray: Any, address: str) -> bool:
    """Connect to a cluster. Returns False if none is named and none runs; raises PlacementError if a named one does not
    answer.
    """
    if address == LOCAL:
        return False
    try:
        _knock(address)
        ray.init(address=address or "auto", **_quiet())
    except (OSError, RuntimeError, ValueError) as exc:
        if "AuthenticationError" in f"{exc.__cause__}":
            raise PlacementError(
                f"the Ray cluster at {address or 'the address that it noted here'} must accept this user's token, but "
                "does not; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token with which it was started"
            ) from exc
        if not address and isinstance(exc, ConnectionError):
            return False
        raise PlacementError(
            f"ray_address must be 'local' or the HOST:PORT of a Ray cluster that answers, got {address!r}: {exc}; "
            "`ray start --head` starts one and prints its address"
        ) from exc
    return True


def _knock(address: str) -> None:
    """Raise OSError when nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _start(ray: Any, settings: ServerSettings, temp_dir: str) -> None:
    """Start a one-node cluster on loopback, with CPUs for all stages even if the machine has fewer."""
    needed = math.ceil(settings.pp_size * settings.ray_cpus_per_stage)
    ray.init(
        num_cpus=max(needed, os.cpu_count() or 1),
        include_dashboard=False,
        _temp_dir=temp_dir,
        _node_ip_address=LOOPBACK,
        **_quiet(),
    )


def _quiet() -> dict[str, Any]:
    return {"logging_level": "ERROR", "log_to_driver": True}


def _processes_of(temp_dir: str) -> list[psutil.Process]:
    """List the processes of the cluster that this process has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(temp_dir in word for word in child.cmdline()) or child.name().startswith("ray::"):
                found.append(child)
    return found


# -- the placement --


@contextlib.contextmanager
def _placed(order: RayOrder, settings: ServerSettings, control: Control) -> Iterator[_Stages]:
    """Reserve a bundle, create an actor and start an agent for each stage. Removes all of them after the block."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    deadline = order.deadline - HEADSTART_S
    bundle = _bundle(ray, settings)
    group = placement_group([bundle] * settings.pp_size, strategy="SPREAD")
    try:
        _await_group(ray, group, bundle, settings, control, deadline)
        host = ray.remote(StageHost)
        actors = [
            host.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=stage),
            ).remote()
            for stage in range(settings.pp_size)
        ]
        places = places_of(ray, actors, deadline)
        order = _with_address(ray, order, settings)
        require_reachable(order, places)
        stages = _Stages(ray, actors, places)
        stages.start(order)
        try:
            yield stages
        finally:
            stages.kill()
    finally:
        remove_placement_group(group)


def _bundle(ray: Any, settings: ServerSettings) -> dict[str, float]:
    """Return the resources of one stage: CPUs, and a GPU if the cluster has any and the device may be one."""
    gpus = 1 if settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
    return {"CPU": settings.ray_cpus_per_stage} | ({"GPU": gpus} if gpus else {})


def _await_group(
    ray: Any, group: Any, bundle: dict[str, float], settings: ServerSettings, control: Control, deadline: float
) -> None:
    """Wait for the bundles. Raises PlacementError with the demand and the cluster's resources if it takes too long."""
    has_warned = False
    while not group.wait(min(LOOK_INTERVAL_S, max(0.1, deadline - time.monotonic()))):
        there, free = _amount(ray.cluster_resources()), _amount(ray.available_resources())
        lack = (
            f"{settings.pp_size} bundles of {_amount(bundle)} cannot be placed now: the cluster has {there} on "
            f"{_nodes(ray)}, of which {free} are free"
        )
        if not has_warned:
            logger.warning("%s; waiting up to start_timeout_s=%s", lack, settings.start_timeout_s)
            has_warned = True
        if time.monotonic() >= deadline:
            raise PlacementError(
                f"every stage must get its own bundle within start_timeout_s={settings.start_timeout_s}, but "
                f"{lack}; add nodes, free some, or lower --pp-size or --ray-cpus-per-stage"
            )
        if wait([control.fileno()], timeout=0):
            control.receive()
            raise PlacementError("the supervisor ended the server before the stages were placed")


def _amount(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


def _nodes(ray: Any) -> str:
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return f"{len(alive)} nodes ({', '.join(alive)})"


def places_of(ray: Any, actors: Sequence[Any], deadline: float) -> list[Place]:
    """Ask each actor for its node. Raises PlacementError if one cannot start or has another version of the engine."""
    try:
        places: list[Place] = ray.get(
            [actor.place.remote() for actor in actors], timeout=max(0.0, deadline - time.monotonic())
        )
    except ray.exceptions.RayError as exc:
        raise PlacementError(
            f"every actor of a stage must start on its node, but {type(exc).__name__}: {exc}; "
            "lockstep-engine[ray] must be installed there, in the version and the Python of this machine"
        ) from exc
    for stage, place in enumerate(places):
        if place.version != __version__:
            raise PlacementError(
                f"all nodes must have the engine's version {__version__}, got {place.version} for stage {stage} on "
                f"{place}; install lockstep-engine[ray]=={__version__} there"
            )
    if nice := sorted({place.name for place in places if place.nice > os.nice(0)}):
        logger.warning(
            "stages on %s run at a lower priority than the server, as Ray starts its workers: other work there delays "
            "every token; start the node with %s=0",
            ", ".join(nice),
            NICENESS,
        )
    return places


def _with_address(ray: Any, order: RayOrder, settings: ServerSettings) -> RayOrder:
    """Replace a wildcard in the order's endpoints by this machine's address in the cluster."""
    if not parse_endpoint(settings.stage_listen, "stage_listen").is_wildcard:
        return order
    address = ray.util.get_node_ip_address()
    stages = [msgspec.structs.replace(one, join=Endpoint(address, one.join.port)) for one in order.stages]
    return msgspec.structs.replace(order, stages=tuple(stages))


def require_reachable(order: RayOrder, places: Sequence[Place]) -> None:
    """Raise PlacementError if stages on other machines would have to join at this machine's loopback."""
    far = next((place for place in places if place.host != socket.gethostname()), None)
    join = order.stages[0].join
    if far is not None and join.is_loopback:
        raise PlacementError(
            f"stage_listen must be an address that {far} can reach, got {join}, which is loopback; "
            "listen on all addresses with --stage-listen 0.0.0.0:0"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
