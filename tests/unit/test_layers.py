"""The layers: arrows of imports only point down, and the core stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The rooms, from the ground up. A room is a folder or a module of its own below a package. It imports rooms before it.
ROOMS = (
    "lockstep",
    "lockstep.errors",
    "lockstep.interruption",
    "lockstep.broken_rules",
    "lockstep.usage_errors",
    "lockstep.extras",
    "lockstep.output_files",
    "engine.core.errors",
    "engine.core.frames",
    "engine.process.clock",
    "engine.core.config",
    "engine",
    "engine.core.stats",
    "engine.core.messages",
    "engine.core.plan",
    "engine.core.limits",
    "engine.grammar",
    "engine.core.memory",
    "engine.core.routing",
    "engine.core.instruments",
    "engine.core.scheduler",
    "engine.core.audit",
    "engine.core.recording",
    "engine.process.links",
    "engine.process.settings",
    "engine.process.settings_sources",
    "engine.process",
    "engine.model",
    "engine.pipeline",
    "engine.server.placement",
    "engine.server.scheduler_process",
    "engine.frontend",
    "engine.server.launch",
    "engine.cluster.router",
    "engine.cluster.serve_app",
    "engine.cli.bench",
    "engine.cli",
    "engine.__main__",
    "scripted.core",
    "scripted.core.errors",
    "scripted.report",
    "scripted.report.new_files",
    "scripted.script",
    "scripted_lockstep.simulated",
    "scripted_lockstep.actions",
    "scripted_lockstep.step_words",
    "scripted_lockstep.specification",
    "scripted_lockstep.oracle",
    "scripted_lockstep.bugs",
    "scripted_lockstep.machine",
    "scripted_lockstep.script",
    "scripted_lockstep.configs",
    "scripted_lockstep.tiers.sim",
    "scripted_lockstep.tiers.server",
    "scripted",
    "scripted.search",
    "scripted.sdk",
    "scripted.replay",
    "scripted.fleets",
    "scripted.adapters",
    "scripted_sglang",
    "scripted_transformers",
    "scripted_vllm",
    "scripted_lockstep.space.workloads",
    "scripted_lockstep.space.rare_scenarios",
    "scripted_lockstep.space.targets",
    "scripted_lockstep.run_forks",
    "scripted_lockstep.gallery_page",
    "scripted_lockstep.script_target",
    "scripted_lockstep.recordings",
    "scripted_lockstep",
    "scripted_lockstep.adapter",
    "scripted_lockstep.fleet.roles",
    "scripted_lockstep.fleet",
    "scripted.api",
    "scripted_lockstep.demo",
    "scripted.shell",
    "scripted.cli",
    "scripted.__main__",
    "scripted.pytest_session",
    "scripted.pytest_plugin",
)
PACKAGES = ("lockstep", "engine", "scripted")
TORCH = ("torch",)
OUTSIDE_WORLD = (
    "time",
    "datetime",
    "random",
    "socket",
    "select",
    "zmq",
    "threading",
    "multiprocessing",
    "asyncio",
    "os",
)
PURE = (
    "engine.core.memory",
    "engine.core.routing",
    "engine.core.instruments",
    "engine.core.scheduler",
    "engine.core.audit",
    "scripted.core.tokens",
    "scripted_lockstep.simulated.grammar",
    "scripted_lockstep.simulated.model",
    "scripted_lockstep.simulated.pipeline",
    "scripted_lockstep.simulated.transfers",
)
WITHOUT_TORCH = (*PURE, "engine.frontend", "engine.grammar", "engine.cluster.router", "engine.cluster.serve_app")


def modules(package: str) -> list[Path]:
    path = ROOT / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Every import of a file, lazy ones too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports anywhere, lazily too, with the line."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.lineno, node.module


# Adapters of others' schedulers, each one room.
FOREIGN = ("scripted_sglang", "scripted_transformers", "scripted_vllm")


def room_of(module: str) -> str:
    """The folder or module below a package; below an adapter its own folders and modules."""
    depth = 4 if module.startswith("scripted.adapters.") else 2
    room = ".".join(module.split(".")[:depth])
    return next((one for one in FOREIGN if room.startswith(one)), room)


def known_modules() -> frozenset[str]:
    return frozenset(name_of(path) for package in PACKAGES for path in modules(package))


def targets(node: ast.Import | ast.ImportFrom, known: frozenset[str]) -> Iterator[str]:
    """The project's modules that a statement imports: ``from engine import bench`` imports ``engine.cli.bench``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
        return
    for alias in node.names:
        name = f"{node.module}.{alias.name}"
        if name in known:
            yield name
        elif node.module in known:
            yield node.module


def arrows() -> Iterator[tuple[str, str, str]]:
    """Every import between modules, those for type checkers and the lazy ones too: from, to, and where it stands."""
    known = known_modules()
    for path in (path for package in PACKAGES for path in modules(package)):
        for node in statements(path):
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield from ((name_of(path), target, where) for target in targets(node, known))


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports_of(package: str, packages: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in modules(package)
        for line, module in imports(path)
        if is_of(module, packages)
    ]


def test_a_foreign_scheduler_does_without_the_engine() -> None:
    """What a script or a search of another scheduler imports has no import of ``engine`` outside a function."""
    ours = ("scripted_lockstep", "scripted_lockstep.demo")
    eager = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}"
        for path in modules("scripted")
        if not is_of(name_of(path), ours)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and is_of(str(node.module), ("engine", *ours))
    ]
    assert not eager, "\n".join(eager)


def test_every_room_is_listed() -> None:
    assert sorted({room_of(name) for name in known_modules()}) == sorted(ROOMS)


def test_arrows_point_down() -> None:
    """Imports between rooms go to a room that is listed before, so there are no circles of rooms either."""
    height = {room: index for index, room in enumerate(ROOMS)}
    wrong = [
        f"{where} imports {target}, which is above it"
        for source, target, where in arrows()
        if height[room_of(target)] > height[room_of(source)]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    """Inside a room too. An import for type checkers alone counts: two files that need each other are one."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in arrows():
        if source != target:
            graph.setdefault(source, set()).add(target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as exc:
        raise AssertionError("these modules import one another: " + " <- ".join(exc.args[1])) from exc


def test_the_harness_has_ten_floors_at_most() -> None:
    """Here all adapters are one room: a room stands above all that it imports, and none is above what it is below."""
    below: dict[str, set[str]] = {}
    for source, target, _ in arrows():
        one, other = (".".join(name.split(".")[:2]) for name in (source, target))
        if one != other and one.startswith("scripted") and other.startswith("scripted"):
            below.setdefault(one, set()).add(other)
    floors: dict[str, int] = {}
    try:
        for room in TopologicalSorter(below).static_order():
            floors[room] = 1 + max((floors[other] for other in below.get(room, ())), default=0)
    except CycleError as exc:
        raise AssertionError("these rooms import one another: " + " <- ".join(exc.args[1])) from exc
    assert max(floors.values()) <= 10, sorted(floors.items(), key=lambda item: item[1])


def test_engine_never_imports_the_harness() -> None:
    wrong = imports_of("engine", ("scripted", "ci"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_no_torch_outside_the_model(package: str) -> None:
    wrong = imports_of(package, TORCH)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PURE)
def test_the_core_touches_nothing_outside(package: str) -> None:
    """No clock, socket, thread or chance: what the core does depends on the events of its steps alone."""
    wrong = imports_of(package, OUTSIDE_WORLD)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["engine.core.scheduler, scripted", "scripted_lockstep.tiers.sim.runner, engine.pipeline.staged"]
)
def test_importing_loads_no_torch(module: str) -> None:
    """D12: in an interpreter of its own, so that nothing that another test imported is seen."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
