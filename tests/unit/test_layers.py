"""The layers: arrows of imports only point down, and the core stays pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from every_case import every_case

ROOT = Path(__file__).resolve().parents[2]

# The rooms, from the ground up: folders and modules. A room imports rooms before it.
ROOMS = (
    "lockstep.errors",
    "lockstep.interruption",
    "lockstep.broken_rules",
    "lockstep.usage_errors",
    "lockstep.extras",
    "lockstep.output_files",
    "lockstep.documents",
    "lockstep.ray_environment",
    "lockstep",
    "engine.core.errors",
    "engine.core.frames",
    "engine.core.config",
    "engine.core.stats",
    "engine.core.messages",
    "engine.core.plan",
    "engine.core.limits",
    "engine.core.memory",
    "engine.core.checkpoint",
    "engine.core.routing",
    "engine.core.instruments",
    "engine.core.scheduler",
    "engine.core.audit",
    "engine.core.recording",
    "engine.core",
    "engine",
    "engine.grammar",
    "engine.process",
    "engine.model",
    "engine.pipeline",
    "engine.frontend.schema",
    "engine.frontend.text",
    "engine.frontend.sessions",
    "engine.frontend.protocols",
    "engine.frontend.http",
    "engine.frontend",
    "engine.server.placement",
    "engine.server.scheduler_process",
    "engine.server.launch",
    "engine.server",
    "engine.cluster.router",
    "engine.cluster.serve_app",
    "engine.cluster",
    "engine.cli",
    "engine.__main__",
    "scripted.core",
    "scripted.report",
    "scripted.script",
    "scripted.search",
    "scripted.sdk",
    "scripted.fleets",
    "scripted.shell",
    "scripted.reruns",
    "scripted.api",
    "scripted",
    "scripted.cli",
    "scripted.__main__",
    "scripted.pytest_session",
    "scripted.pytest_plugin",
    "scripted_lockstep.simulated",
    "scripted_lockstep.actions",
    "scripted_lockstep.step_words",
    "scripted_lockstep.specification",
    "scripted_lockstep.oracle",
    "scripted_lockstep.mutants",
    "scripted_lockstep.machine",
    "scripted_lockstep.configs",
    "scripted_lockstep.script",
    "scripted_lockstep.tiers.sim",
    "scripted_lockstep.tiers.server",
    "scripted_lockstep.tiers",
    "scripted_lockstep.space",
    "scripted_lockstep.run_forks",
    "scripted_lockstep.gallery_page",
    "scripted_lockstep.script_target",
    "scripted_lockstep.recordings",
    "scripted_lockstep.demo",
    "scripted_lockstep",
    "scripted_lockstep.adapter",
    "scripted_lockstep.fleet",
    "scripted_lockstep.sessions",
    "scripted_sglang",
    "scripted_transformers",
    "scripted_vllm",
    "scripted_plugins",
)
ADAPTERS = ("scripted_lockstep", "scripted_sglang", "scripted_transformers", "scripted_vllm")
PLUGINS = "scripted_plugins"
PACKAGES = ("lockstep", "engine", "scripted", *ADAPTERS, PLUGINS)
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
    "scripted_lockstep.simulated.failures",
    "scripted_lockstep.simulated.grammar",
    "scripted_lockstep.simulated.model",
    "scripted_lockstep.simulated.pipeline",
    "scripted_lockstep.simulated.row",
    "scripted_lockstep.simulated.transfers",
)
WITHOUT_TORCH = (*PURE, "engine.frontend", "engine.grammar", "engine.cluster.router", "engine.cluster.serve_app")


def modules(package: str) -> list[Path]:
    path = ROOT / ("adapters" if is_of(package, (*ADAPTERS, PLUGINS)) else "") / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("adapters.")


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


def room_of(module: str) -> str:
    """The folder or module of the list that a module is in: the innermost one."""
    parts = module.split(".")
    rooms = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(room for room in rooms if room in ROOMS)


@cache
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


@cache
def arrows() -> tuple[tuple[str, str, str], ...]:
    """Every import between modules, those for type checkers and the lazy ones too: from, to, and where it stands."""
    known = known_modules()
    return tuple(
        (name_of(path), target, f"{path.relative_to(ROOT)}:{node.lineno}")
        for package in PACKAGES
        for path in modules(package)
        for node in statements(path)
        for target in targets(node, known)
    )


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports_of(package: str, packages: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in modules(package)
        for line, module in imports(path)
        if is_of(module, packages)
    ]


def test_the_harness_knows_neither_the_engine_nor_an_adapter() -> None:
    wrong = imports_of("scripted", ("engine", *ADAPTERS))
    assert not wrong, "\n".join(wrong)


@every_case("package", ADAPTERS[1:])
def test_an_adapter_of_another_engine_knows_no_other_adapter(package: str) -> None:
    wrong = imports_of(package, ("engine", *(other for other in ADAPTERS if other != package)))
    assert not wrong, "\n".join(wrong)


def test_every_room_is_listed() -> None:
    """A folder or module directly below a package, or below an adapter of ours, belongs to a room of its own."""
    assert {room_of(name) for name in known_modules()} == set(ROOMS)


def test_the_page_of_the_tree_has_every_room() -> None:
    """Each room is in one row of the table, by the innermost folder, and each row is a folder."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The tree\n")[2].partition("\n## ")[0]
    folders = re.findall(r"^\| `([\w/]+)` \|", section, re.MULTILINE)
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    rows = [folder.removeprefix("adapters/").replace("/", ".") for folder in folders]
    assert len(rows) == len(set(rows))
    # Modules directly below a package belong to none of its folders.
    loose = [room for room in ROOMS if not any(is_of(room, (row,)) for row in rows)]
    assert [room for room in loose if room not in PACKAGES and (ROOT / room.replace(".", "/")).is_dir()] == []


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


# The rooms that a reader meets first, with the most floors and arrows that they may have.
HOUSES = {"engine": (8, 30), "engine.frontend": (5, 11), "scripted": (10, 43)}


@every_case("house", HOUSES)
def test_a_house_has_few_floors_and_few_arrows(house: str) -> None:
    """A room here is a folder or module directly below the package; it stands above every room that it imports."""
    depth, below = house.count(".") + 2, dict[str, set[str]]()
    for source, target, _ in arrows():
        one, other = (".".join(name.split(".")[:depth]) for name in (source, target))
        if one != other and is_of(one, (house,)) and is_of(other, (house,)) and house not in (one, other):
            below.setdefault(one, set()).add(other)
    floors: dict[str, int] = {}
    try:
        for room in TopologicalSorter(below).static_order():
            floors[room] = 1 + max((floors[other] for other in below.get(room, ())), default=0)
    except CycleError as exc:
        raise AssertionError("these rooms import one another: " + " <- ".join(exc.args[1])) from exc
    most_floors, most_arrows = HOUSES[house]
    assert max(floors.values()) <= most_floors, sorted(floors.items(), key=lambda item: item[1])
    assert sum(map(len, below.values())) <= most_arrows, below


def test_engine_never_imports_the_harness() -> None:
    wrong = imports_of("engine", ("scripted", "ci", *ADAPTERS))
    assert not wrong, "\n".join(wrong)


@every_case("package", WITHOUT_TORCH)
def test_no_torch_outside_the_model(package: str) -> None:
    wrong = imports_of(package, TORCH)
    assert not wrong, "\n".join(wrong)


@every_case("package", PURE)
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
