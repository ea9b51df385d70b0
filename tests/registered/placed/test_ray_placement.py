"""A server whose stages Ray places on a cluster of four nodes, under clients, from its start to the end of everything.

Goal: tokens are those of one process; load loses nothing; a killed actor, a lost node and a cut link end every stream;
what cannot be placed is refused in time, and of every server nothing is left. Method: one cluster for the file, the
load run of tests/load on it, in short; `make ray` ends with the long one. Origin: stages on several machines; A06,
B11, C05.
Mutants: none, the scripts on placed stages name theirs.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from ci.register import register_cpu_ci
from engine.core.errors import StartupError
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

register_cpu_ci(est_time=440, suite="ray-cpu")
# Ray handles SIGTERM until its process ends.
pytestmark = pytest.mark.usefixtures("restores_signal_handlers")

pytest.importorskip("ray", reason="Ray is an optional extra")
sys.path.insert(0, str(Path(__file__).parents[2] / "load"))

from cluster import FAULTS, NODE_CPUS, STAGES, Scene, different_tokens, run_scene  # noqa: E402 - found by now
from scripted_lockstep.tiers.server.ray_cluster import LocalCluster  # noqa: E402

START_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 10.0
# Tests judge no pace: the load of `make ray` does.
PATIENCE_S = 30.0
CLIENTS = 16


@pytest.fixture(scope="module", autouse=True)
def _only_with_ray(pytestconfig):
    """A cluster takes minutes on a small machine, so a run of all registered tests leaves it out."""
    if pytestconfig.getoption("scripted_placement") != "ray":
        pytest.skip("it starts Ray clusters; make ray, or --placement ray")


@pytest.fixture(scope="module")
def parent():
    with PreloadedParent.start() as started:
        yield started


@pytest.fixture(scope="module")
def cluster():
    with contextlib.closing(LocalCluster(STAGES, cpus=NODE_CPUS)) as started:
        yield started


@pytest.fixture
def scene(parent, cluster):
    return Scene(parent, cluster, clients=CLIENTS, seconds=3.0, seed=1, death_bound_s=PATIENCE_S)


def test_the_tokens_are_those_of_one_process(scene):
    """A05: the same requests, greedily, with one process and with four stages on four nodes."""
    assert different_tokens(scene) == []


def test_load_loses_nothing(scene):
    """B05, B11, C05: after a third of it a link is 50 ms late."""
    result = run_scene(scene, "slow")
    assert result.complaints == []
    assert result.compared > 0


def test_what_cannot_be_placed_is_refused_in_time(parent, cluster, tmp_path):
    """A03: the error has what the cluster has and what was asked for."""
    asked = ServerSettings(
        port=0,
        pp_size=STAGES,
        placement="ray",
        ray_address=cluster.address,
        ray_cpus_per_stage=NODE_CPUS + 1,
        stage_listen="127.0.0.1:0",
        start_timeout_s=START_TIMEOUT_S,
    )
    with _ended(parent.serve(asked, tmp_path, tmp_path / "log")) as process, pytest.raises(StartupError) as caught:
        process.wait_ready(2 * START_TIMEOUT_S)
    said = str(caught.value)
    assert f"{STAGES} bundles of {NODE_CPUS + 1} CPUs" in said
    assert f"the cluster has {STAGES * NODE_CPUS} CPUs and 0 GPUs on {STAGES} nodes" in said


# The loss of a node comes last: the others need all four.
@pytest.mark.parametrize("name", sorted(FAULTS, key="node".__eq__))
def test_a_fault_ends_every_stream_with_an_error(scene, name):
    """A06: after the fault, or after the bound on a silence that nothing breaks."""
    result = run_scene(scene, name)
    assert result.complaints == []
    print(f"{name}: the final message of {result.cut_streams} streams came {result.final_message_s:.2f} s after it")  # noqa: T201 - a figure
    assert result.cut_streams > 0
    assert any("process died" in outcome.error for outcome in result.outcomes)


def test_a_server_without_a_cluster_starts_one_and_ends_it(parent, tmp_path):
    """A04: one node on loopback, and no process, file or port of it afterwards."""
    ours = ServerSettings(port=0, pp_size=2, placement="ray", ray_address="local", stage_listen="127.0.0.1:0")
    with _ended(parent.serve(ours, tmp_path, tmp_path / "log")) as process:
        process.wait_ready(400)
        started = psutil.Process(process.pid).children(recursive=True)
        folders = {Path(word) for one in started for word in _words(one) if word.startswith("--temp_dir=")}
        assert any("raylet" in " ".join(_words(one)) for one in started)
        process.terminate()
        assert process.wait(30) == 0
    _, left = psutil.wait_procs(started, timeout=GONE_TIMEOUT_S)
    assert [one.name() for one in left] == []
    assert not [folder for folder in folders if Path(str(folder).partition("=")[2]).exists()]


@contextlib.contextmanager
def _ended(process):
    """A server for the length of a block, also one that fails."""
    try:
        yield process
    finally:
        process.kill()
        process.wait(GONE_TIMEOUT_S)
        process.close()


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
