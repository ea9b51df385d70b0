"""Placing stages with Ray, without a cluster: what is asked for, what is refused and in which words, how an agent runs.

The cluster is a stand-in here; a real one is in the suite ``ray-cpu``.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import socket
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import __version__
from engine.core.errors import ConfigError, PlacementError
from engine.process.control import Control, Shutdown
from engine.process.links.endpoint import Endpoint, parse_endpoint
from engine.process.settings import ServerSettings
from engine.server.placement import ray_actor, ray_driver
from engine.server.placement.messages import StageOrder
from engine.server.placement.ray_actor import Place, StageHost
from engine.server.placement.ray_order import RayOrder, require_ray
from lockstep.ray_environment import ray_defaults

SECRET = "0123456789abcdef0123456789abcdef"
HERE = Place(node_id="a" * 56, address="127.0.0.2", host=socket.gethostname(), version=__version__)
FAR = Place(node_id="b" * 56, address="10.0.0.7", host="far-away", version=__version__)


class Cluster:
    """A stand-in for the module ``ray``: numbers of a cluster, and values for what ``get`` is asked."""

    exceptions = SimpleNamespace(RayError=RuntimeError)
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def __init__(self, **resources: float) -> None:
        self.resources = resources

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": f"10.0.0.{number}", "Alive": number < 3} for number in (1, 2, 3)]

    def get(self, values: list[Any], timeout: float) -> list[Any]:
        assert timeout > 0
        return values


class Group:
    """A placement group that gets its bundles after a number of looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def wait(self, seconds: float) -> bool:
        time.sleep(min(seconds, 0.01))
        self.looks -= 1
        return self.looks < 0


def settings(**fields: Any) -> ServerSettings:
    return ServerSettings(pp_size=4, placement="ray", **fields)


def order(*joins: str) -> RayOrder:
    stages = tuple(StageOrder(join=parse_endpoint(join, "join")) for join in joins)
    return RayOrder(settings="{}", stages=stages, secret_file="", deadline=0.0, temp_dir="")


def control() -> tuple[Control, Any]:
    ours, theirs = Pipe()
    return Control(theirs), ours


@pytest.mark.parametrize(
    ("device", "resources", "asked"),
    [
        ("auto", {"CPU": 8.0}, {"CPU": 2.0}),
        ("auto", {"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 1}),
        ("cpu", {"CPU": 8.0, "GPU": 4.0}, {"CPU": 2.0}),
    ],
)
def test_a_stage_asks_for_a_gpu_where_there_are_some(device: str, resources: Any, asked: Any) -> None:
    given = settings(device=device, ray_cpus_per_stage=2)
    assert ray_driver._bundle(Cluster(**resources), given) == asked


def test_a_placement_that_comes_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    listening, _ = control()
    deadline = time.monotonic() + 60
    with caplog.at_level(logging.WARNING):
        ray_driver._await_group(Cluster(CPU=2.0), Group(3), {"CPU": 1.0}, settings(), listening, deadline)
    assert len(caplog.messages) == 1
    assert "4 bundles of 1 CPUs and 0 GPUs cannot be placed now" in caplog.text


def test_a_placement_that_never_comes_says_what_is_there_and_what_was_asked() -> None:
    listening, _ = control()
    with pytest.raises(PlacementError) as caught:
        ray_driver._await_group(
            Cluster(CPU=2.0), Group(float("inf")), {"CPU": 1.0}, settings(), listening, time.monotonic() + 0.05
        )
    said = str(caught.value)
    assert "within start_timeout_s=600.0" in said
    assert "4 bundles of 1 CPUs" in said
    assert "2 CPUs and 0 GPUs on 2 nodes (10.0.0.1, 10.0.0.2), of which 1 CPUs and 0 GPUs are free" in said
    assert "lower --pp-size or --ray-cpus-per-stage" in said


def test_a_wait_for_a_placement_ends_with_the_server() -> None:
    listening, supervisor = control()
    supervisor.send_bytes(msgspec.msgpack.encode(Shutdown()))
    with pytest.raises(PlacementError, match="the supervisor ended the server"):
        ray_driver._await_group(
            Cluster(CPU=2.0), Group(float("inf")), {"CPU": 1.0}, settings(), listening, time.monotonic() + 60
        )


def actors_on(*places: Place) -> list[SimpleNamespace]:
    return [SimpleNamespace(place=SimpleNamespace(remote=lambda place=place: place)) for place in places]


def test_a_node_that_makes_its_workers_nice_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's default niceness makes the stages yield to all other work."""
    monkeypatch.setattr(ray_driver.os, "nice", lambda _: 0)
    ray_driver.places_of(Cluster(), actors_on(HERE, FAR), time.monotonic() + 1)
    assert caplog.text == ""
    ray_driver.places_of(Cluster(), actors_on(HERE, msgspec.structs.replace(FAR, nice=15)), time.monotonic() + 1)
    assert f"stages on node {'b' * 12} run at a lower priority" in caplog.text
    assert "RAY_worker_niceness=0" in caplog.text


def test_a_node_with_another_engine_is_refused() -> None:
    old = msgspec.structs.replace(FAR, version="0.0.1")
    actors = actors_on(HERE, old)
    with pytest.raises(PlacementError, match=r"version .*got 0\.0\.1 for stage 1 on node b{12} at 10\.0\.0\.7"):
        ray_driver.places_of(Cluster(), actors, time.monotonic() + 1)


def test_an_actor_that_dies_before_the_server_is_open_is_told_with_rays_reason() -> None:
    """The kernel or Ray may have killed it for memory, and only Ray says so."""

    class Ray(Cluster):
        def wait(self, runs: list[str], **_: float) -> tuple[list[str], list[str]]:
            return runs[:1], runs[1:]

        def get(self, values: Any, timeout: float = 0.0) -> Any:
            raise self.exceptions.RayError(f"{values} died.\n\tpid: 5\nMemory was 22.43GB / 23.54GB")

    stages = ray_driver._Stages(Ray(), ["actor"], [FAR])
    stages._runs.append("run")
    with pytest.raises(PlacementError) as caught:
        stages._tell_end(serving=False)
    assert str(caught.value).endswith("server was open; Ray says: run died. pid: 5 Memory was 22.43GB / 23.54GB")
    assert "the actor of stage 0 on node bbbbbbbbbbbb at 10.0.0.7 died" in str(caught.value)
    # Once it serves, the supervisor tells of the end.
    stages._tell_end(serving=True)


def test_loopback_is_refused_for_other_machines_and_taken_for_this_one() -> None:
    ray_driver.require_reachable(order("127.0.0.1:5"), [HERE, HERE])
    ray_driver.require_reachable(order("10.0.0.1:5"), [HERE, FAR])
    with pytest.raises(PlacementError, match=r"node b{12} at 10\.0\.0\.7 can reach, got 127\.0\.0\.1:5"):
        ray_driver.require_reachable(order("127.0.0.1:5"), [HERE, FAR])


def test_stages_are_sent_to_an_address_and_not_to_a_wildcard() -> None:
    given = order("machine:5", "machine:5")
    everywhere = ray_driver._with_address(Cluster(), given, settings(stage_listen="0.0.0.0:0"))
    assert [str(stage.join) for stage in everywhere.stages] == ["10.0.0.1:5", "10.0.0.1:5"]
    assert ray_driver._with_address(Cluster(), given, settings(stage_listen="127.0.0.1:0")) is given


@pytest.mark.usefixtures("restores_signal_handlers")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_does_not_answer_is_refused_at_once(address: str) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an optional extra")
    with pytest.raises(PlacementError, match=f"ray_address must be .*, got '{address}'"):
        ray_driver._connect(ray, address)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install lockstep-engine\[ray\], or use placement='join'"):
        require_ray()


CHILD = """
import sys
given = sys.stdin.read()
sys.stderr.write("".join(f"line {number}\\n" for number in range(20)))
sys.stderr.write(f"{sys.argv[1:]} {given}\\n")
sys.exit(3)
"""


def test_an_agent_is_told_everything_by_a_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The secret is in no argument and no file; the last lines of stderr and the status come back."""
    (tmp_path / "child_of_an_actor.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ray_actor, "CHILD_MODULE", "child_of_an_actor")
    given = StageOrder(join=Endpoint("127.0.0.1", 5), stage=2, node=str(FAR))
    end = StageHost().run(given, SECRET)
    assert end.status == 3
    arguments, _, told = end.said[-1].partition(" ")
    assert arguments == f"['{os.getpid()}']"
    assert msgspec.json.decode(told, type=tuple[StageOrder, str]) == (given, SECRET)
    assert end.said[:-1] == tuple(f"line {number}" for number in itertools.islice(range(20), 9, 20))


def test_a_cluster_that_wants_another_token_is_not_replaced_by_one_of_our_own() -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect") from RuntimeError("AuthenticationError: InvalidAuthToken")

    with pytest.raises(PlacementError, match="must accept this user's token, but does not; set RAY_AUTH_TOKEN"):
        ray_driver._connect(SimpleNamespace(init=refuse), "")


@pytest.mark.parametrize(
    ("environment", "file", "mode"),
    [({}, False, None), ({}, True, "token"), ({"RAY_AUTH_TOKEN": "t"}, False, "token")],
    ids=["no token", "file", "variable"],
)
def test_a_token_is_used_where_there_is_one(
    environment: dict[str, str], file: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` asks for it there, and a driver that does not look for it cannot connect."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("t")
    assert ray_defaults().get("RAY_AUTH_MODE") == mode
