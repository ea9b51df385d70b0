"""The layers: arrows of imports only point down, and the core stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the ground up. A module may import its own layer and those below it; the longest prefix decides which layer it
# is in.
LAYERS = {
    "engine.errors": 0,
    "engine.clock": 0,
    "engine.messages": 0,
    "engine.plan": 0,
    "engine.config": 0,
    "engine.limits": 0,
    "engine.memory": 1,
    # The protocol through which the loop launches; its implementations stand far above.
    "engine.pipeline.base": 2,
    "engine.scheduler": 2,
    "engine.recording": 3,
    "engine.model": 3,
    "engine.pipeline": 4,
    "engine.launch": 5,
    "engine.frontend": 5,
    "engine": 6,
    "scripted": 7,
}
TORCH = ("torch",)
DOORS = ("time", "datetime", "random", "socket", "select", "zmq", "threading", "multiprocessing", "asyncio", "os")
PURE = ("engine.memory", "engine.scheduler", "engine.pipeline.simulated")
WITHOUT_TORCH = (*PURE, "engine.frontend", "engine.pipeline.base")


def modules(package: str) -> list[Path]:
    path = ROOT / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports anywhere, lazily too, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.lineno, node.module


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((LAYERS[name] for name in names if name in LAYERS), None)


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports_of(package: str, packages: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in modules(package)
        for line, module in imports(path)
        if is_of(module, packages)
    ]


def test_arrows_point_down() -> None:
    wrong = []
    for path in modules("engine"):
        own = layer_of(name_of(path))
        assert own is not None
        for line, module in imports(path):
            other = layer_of(module) if module != "engine" else 0  # The package itself: its configuration.
            if other is not None and other > own:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}, which is above it")
    assert not wrong, "\n".join(wrong)


def test_engine_never_imports_the_harness() -> None:
    wrong = imports_of("engine", ("scripted", "ci"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_no_torch_outside_the_model(package: str) -> None:
    wrong = imports_of(package, TORCH)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PURE)
def test_the_core_has_no_door_of_its_own(package: str) -> None:
    """No clock, socket, thread or chance: what the core does depends on the events of its steps alone."""
    wrong = imports_of(package, DOORS)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["engine.scheduler, scripted", "engine.pipeline.simulated, engine.pipeline.staged"])
def test_importing_loads_no_torch(module: str) -> None:
    """D12: in an interpreter of its own, so that nothing that another test imported is seen."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
