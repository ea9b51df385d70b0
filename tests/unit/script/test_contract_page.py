"""The page of the contract against the code: every call on it exists, with the signature that the page gives."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from every_case import every_case

import scripted
from engine import EngineConfig
from scripted import ScriptedServer, ScriptedSim

PAGE = (Path(__file__).parents[3] / "docs/script_api.md").read_text(encoding="utf-8")
CALL = re.compile(r"(?<![.\w])((?:clock\.)?\w+)\((.*?)\)$")
# Said once for all waits, above their table.
BUDGET = "max_steps=400"
WAITS = ("run_until", "advance_to")


def _calls() -> Iterator[Any]:
    """Every call in the first column of a table of verbs, waits or queries."""
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            for code in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                if found := CALL.match(code):
                    yield pytest.param(found[1], found[2], id=found[1])


def _parameters_of(name: str) -> list[inspect.Parameter]:
    if name.startswith("clock."):
        owner: Callable[..., Any] = getattr(inspect.getattr_static(scripted.ScriptContext, "clock"), "fget", None)
        kind = inspect.signature(owner, eval_str=True).return_annotation
        function = getattr(kind, name.removeprefix("clock."))
    else:
        function = getattr(scripted.ScriptContext, name)
    return list(inspect.signature(function).parameters.values())[1:]


def _documented(text: str) -> list[tuple[str, bool, object]]:
    """Name, whether it is keyword-only, and default of each parameter in a call as the page writes it."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    required: list[object] = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    plain = zip(arguments.args, [*required, *map(ast.literal_eval, arguments.defaults)], strict=True)
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [(argument.arg, False, default) for argument, default in plain] + [
        (argument.arg, True, inspect.Parameter.empty if default is None else ast.literal_eval(default))
        for argument, default in keywords
    ]


@every_case(("name", "text"), list(_calls()))
def test_a_call_has_its_documented_signature(name: str, text: str) -> None:
    """D09: names, order, defaults, and what must be given by name."""
    actual = [
        (parameter.name, parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.default)
        for parameter in _parameters_of(name)
    ]
    expected = _documented(text)
    if name.startswith(WAITS):
        assert BUDGET in PAGE
        actual = [entry for entry in actual if f"{entry[0]}={entry[2]}" != BUDGET]
    assert actual == expected


def test_the_page_has_all_the_calls() -> None:
    """A pattern that found nothing would make the test above say nothing."""
    names = [parameter.values[0] for parameter in _calls()]
    assert len(names) == len(set(names))
    assert len(names) >= 35
    assert {"start_req", "flush_cache", "clock.advance", "run_until", "advance_to_stage", "stage"} <= set(names)


def test_the_decorator_takes_what_the_contract_says() -> None:
    """A budget counts steps, and shows the state when it is spent (D07).

    What cannot be a test is refused at its line (D08).
    """
    parameters = inspect.signature(scripted.scripted).parameters
    defaults = {name: parameters[name].default for name in ("tiers", "timeout_s", "max_steps")}
    assert defaults == {"tiers": ("sim", "server"), "timeout_s": 120, "max_steps": 10_000}
    assert {"must_reach", "oracle"} <= set(parameters)


@every_case("kind", [ScriptedSim, ScriptedServer])
def test_both_harnesses_offer_the_same_methods(kind: type) -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""
    run = inspect.signature(kind.run).parameters  # type: ignore[attr-defined]
    assert next(iter(inspect.signature(kind.start).parameters)) == "config"  # type: ignore[attr-defined]
    assert run["timeout_s"].default == 120
    assert callable(kind.shutdown)  # type: ignore[attr-defined]


def test_the_configuration_has_the_fields_that_scripts_use() -> None:
    """C09: with the defaults of the contract."""
    config = EngineConfig()
    assert (config.model, config.device, config.seed, config.pp_size, config.pp_async_depth) == (
        "embedded",
        "auto",
        0,
        1,
        0,
    )
    assert (config.chunked_prefill_size, config.mixed_chunk, config.page_size) == (512, False, 16)
    assert (config.radix_cache, config.schedule_policy, config.priority_preemption) == (True, "fcfs", False)
    assert config.kv_sanitizer is False
