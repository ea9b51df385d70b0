"""Features: the core names none of them, and calls only the hooks that a feature which is on defines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from simulated_engine import SimulatedEngine

from engine.core import scheduler
from engine.core.scheduler.feature import Feature, Hooks
from engine.core.scheduler.features import Features

FOLDER = Path(scheduler.__file__).parent
CORE = ("core", "planner", "admission", "books", "request", "feature", "policy", "ports", "replies", "sizes")
# Asked of every feature, also while it is off; ``finish`` only of the owner of a microbatch.
OF_ALL = {
    "handlers",
    "refusal_of",
    "is_due",
    "finish",
    "stats",
    "is_at_rest",
    "snapshot",
    "restore",
    "deadline",
    "is_on",
    "control",
}
KINDS = tuple(type(feature) for feature in SimulatedEngine().scheduler.features)


def imported_by(module: str) -> set[str]:
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_no_feature(module: str) -> None:
    assert imported_by(module).isdisjoint({kind.__module__ for kind in KINDS})


def test_the_scheduler_imports_the_list_of_features_alone() -> None:
    assert imported_by("scheduler").isdisjoint({kind.__module__ for kind in KINDS})
    assert Features.__module__ in imported_by("scheduler")


def test_every_hook_that_a_feature_defines_is_called() -> None:
    """A misspelt hook, or one that the core has forgotten, would be silent."""
    hooks = {name for name in vars(Feature) if not name.startswith("_")}
    assert hooks == OF_ALL | Hooks.__annotations__.keys()


def test_a_feature_that_is_off_is_not_called() -> None:
    plain = SimulatedEngine().scheduler
    on = {feature for hook in Hooks.__annotations__ for feature in getattr(plain.hooks, hook)}
    features = plain.features
    assert on.isdisjoint({features.loras, features.drafts, features.window_layers, features.host_copies})
    loras = SimulatedEngine(max_loras=1).scheduler
    assert loras.features.loras in loras.hooks.launch


def test_the_order_of_hooks_is_the_order_of_features() -> None:
    engine = SimulatedEngine(max_loras=1).scheduler
    features = engine.features
    assert engine.hooks.launch == (features.flush_and_update, features.profiles, features.sleeping, features.loras)
