"""The executable specification: it stands on its own, says what the page of rules says, and finds what differs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from base_workloads import WORKLOADS
from every_case import every_case
from scripted_lockstep.run_forks import UNSPECIFIED_EVERY_RUNS, is_specified
from scripted_lockstep.specification import specification
from scripted_lockstep.specification.conformance import RULES, Conformance, Nonconformance

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS, Limits
from engine.core.memory import Node
from engine.core.messages import (
    CallAnswer,
    Event,
    FlushCache,
    Generate,
    GetStats,
    PauseMode,
    Reply,
    SamplingParams,
    StatsAnswer,
    TokenOutput,
)
from engine.core.plan import Forward
from engine.core.scheduler import Scheduler, StepResult
from engine.core.scheduler.counters import Counters
from engine.core.stats import EngineStats
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.search.execution import execute
from scripted.search.strategies import Exhaustive

_ROOT = Path(__file__).parents[3]
_PAGES = sorted(
    page
    for page in Path(specification.__file__).parent.glob("*.py")
    if page.stem not in ("__init__", "conformance", "expected")
)
_LINES_LIMIT = 450
_LIMITS = Limits.of(EngineConfig(page_size=4, chunked_prefill_size=8, max_total_tokens=64), EMBEDDED_FACTS)


def _rules() -> str:
    return " ".join((_ROOT / "docs" / "rules.md").read_text(encoding="utf-8").split())


def test_it_is_a_page() -> None:
    assert len(Path(specification.__file__).read_text(encoding="utf-8").splitlines()) <= _LINES_LIMIT


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_it_shares_nothing_with_the_engine_but_messages_plans_and_limits(page: Path) -> None:
    """A specification that asked the engine would share its faults."""
    tree = ast.parse(page.read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
    engine = {name for name in modules if name.split(".")[0] == "engine"}
    allowed = {f"engine.core.{module}" for module in ("limits", "messages", "plan", "stats")}
    assert engine <= {"engine", "engine.core", *allowed}
    package = "scripted_lockstep.specification"
    known = {f"{package}.expected", *(f"{package}.{other.stem}" for other in _PAGES)}
    assert {name for name in modules if name.startswith("scripted")} <= known


@every_case("page", _PAGES)
def test_every_rule_that_it_names_is_on_the_page_of_rules(page: Path) -> None:
    names = re.findall(r"\*\*([A-Z][a-z ]+)\*\*", page.read_text(encoding="utf-8"))
    missing = [name for name in names if f"**{name}.**" not in _rules() and f"**{name}**:" not in _rules()]
    assert not missing


def test_a_difference_is_named_in_the_words_of_the_page_of_rules() -> None:
    missing = [name for name, sentence in RULES.items() if f"**{name}.** {sentence}" not in _rules()]
    assert not missing


@pytest.mark.parametrize("policy", get_args(EngineConfig.model_fields["schedule_policy"].annotation))
def test_every_policy_has_a_workload_that_is_compared(policy: str) -> None:
    """B10: a new policy without one would be in no search."""
    configs = [base.config for base in WORKLOADS.values()]
    assert [one for one in configs if one.schedule_policy == policy]


def test_most_of_the_forked_runs_are_compared_the_same_ones_in_every_process() -> None:
    base = WORKLOADS["full-pages"]
    runs = [is_specified(repr(extra)) for extra in Exhaustive().additions("full-pages", base, 20)]
    others = len(runs) - sum(runs)
    assert len(runs) / UNSPECIFIED_EVERY_RUNS * 0.7 < others < len(runs) / UNSPECIFIED_EVERY_RUNS * 1.3
    assert runs == [is_specified(repr(extra)) for extra in Exhaustive().additions("full-pages", base, 20)]


# -- every part of a step is compared --


def _first_step() -> tuple[Scheduler, tuple[Generate, ...], StepResult]:
    scheduler = Scheduler(_LIMITS)
    events = (Generate(rid="a", prompt_ids=tuple(range(1, 12)), sampling=SamplingParams(seed=3, max_new_tokens=4)),)
    return scheduler, events, scheduler.step(events, 0.0)


def _judged(result: StepResult, scheduler: Scheduler, events: tuple[Event, ...]) -> str:
    with pytest.raises(Nonconformance) as caught:
        Conformance(_LIMITS).check(events, 0.0, result, scheduler)
    return caught.value.rule


def _changed(result: StepResult, **changes: object) -> StepResult:
    assert result.microbatch is not None
    segment = msgspec.structs.replace(result.microbatch.segments[0], **changes)
    return msgspec.structs.replace(result, microbatch=msgspec.structs.replace(result.microbatch, segments=(segment,)))


def test_a_step_as_it_should_be_passes() -> None:
    scheduler, events, result = _first_step()
    Conformance(_LIMITS).check(events, 0.0, result, scheduler)


def test_how_often_a_request_was_sent_back_is_compared() -> None:
    """Only scripts see the count; an engine that counted twice used to pass."""
    scheduler, events, result = _first_step()
    scheduler.books.requests["a"].retractions += 1
    assert _judged(result, scheduler, events) == "Retract"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rid": "b"}, "Order"),
        ({"start": 4}, "Hit"),
        ({"token_ids": (1, 2, 3)}, "Chunks"),
        ({"token_ids": (9, 2, 3, 4, 5, 6, 7, 8)}, "Result"),
        ({"emits": True}, "Chunks"),
        ({"sampling": None}, "Sampling"),
        ({"page_start": 1}, "Told"),
        ({"pages": (0,)}, "Told"),
    ],
)
def test_every_field_of_a_segment_has_its_rule(changes: dict[str, object], rule: str) -> None:
    scheduler, events, result = _first_step()
    assert _judged(_changed(result, **changes), scheduler, events) == rule


def test_every_field_of_the_sampling_is_compared() -> None:
    scheduler, events, result = _first_step()
    assert result.microbatch is not None
    sampling = result.microbatch.segments[0].sampling
    assert sampling is not None
    for name in sampling.__struct_fields__:
        other = msgspec.structs.replace(sampling, **{name: _another(getattr(sampling, name))})
        assert _judged(_changed(result, sampling=other), scheduler, events) == "Sampling", name


def test_a_microbatch_too_much_too_few_or_of_another_kind() -> None:
    scheduler, events, result = _first_step()
    assert result.microbatch is not None
    assert _judged(msgspec.structs.replace(result, microbatch=None), scheduler, events) == "Launch"
    other = Forward(1, result.microbatch.mode, result.microbatch.segments)
    assert _judged(msgspec.structs.replace(result, microbatch=other), scheduler, events) == "Launch"
    assert _judged(result, scheduler, ()) == "Launch"


def test_the_loops_signals_are_compared() -> None:
    scheduler, events, result = _first_step()
    assert _judged(msgspec.structs.replace(result, again=not result.again), scheduler, events) == "Again"
    assert _judged(msgspec.structs.replace(result, deadline=1.0), scheduler, events) == "Deferred"


def test_a_reply_too_much_or_too_few() -> None:
    scheduler, events, result = _first_step()
    extra: tuple[Reply, ...] = (TokenOutput(rid="a", token_ids=(1,)),)
    assert _judged(msgspec.structs.replace(result, replies=extra), scheduler, events) == "Result"
    answer: tuple[Reply, ...] = (CallAnswer(call_id="1", ok=True, message=""),)
    assert _judged(msgspec.structs.replace(result, replies=answer), scheduler, events) == "Calls"
    flush = FlushCache(call_id="1")
    assert _judged(result, scheduler, (flush, *events)) == "Calls"  # type: ignore[arg-type]


@every_case("name", EngineStats.__struct_fields__)
def test_every_counter_and_size_is_compared(name: str) -> None:
    """In every answer that has them."""
    scheduler = Scheduler(_LIMITS)
    events = (GetStats(call_id="stats"),)
    result = scheduler.step(events, 0.0)
    (answer,) = result.replies
    assert isinstance(answer, StatsAnswer)
    stats = msgspec.structs.replace(answer.stats, **{name: _another(getattr(answer.stats, name))})
    other = msgspec.structs.replace(result, replies=(msgspec.structs.replace(answer, stats=stats),))
    assert _judged(other, scheduler, events) in RULES


@every_case("name", [field.name for field in fields(Counters)])
def test_every_counter_is_compared_after_every_step(name: str) -> None:
    scheduler, events, result = _first_step()
    setattr(scheduler.counters, name, getattr(scheduler.counters, name) + 1)
    assert _judged(result, scheduler, events) in RULES


_SIZES: dict[str, Callable[[Scheduler], object]] = {
    "waiting": lambda scheduler: scheduler.books.waiting.clear(),
    "in flight": lambda scheduler: scheduler.books.in_flight.clear(),
    "running": lambda scheduler: scheduler.books.running.update(scheduler.books.requests),
    "chunked": lambda scheduler: setattr(scheduler.books, "chunked", None),
    "alive": lambda scheduler: scheduler.books.requests.clear(),
    "paused": lambda scheduler: setattr(scheduler.books, "paused", PauseMode.RETRACT),
    "free pages": lambda scheduler: setattr(scheduler.memory.pages, "free", 1),
    "cached pages": lambda scheduler: setattr(scheduler.memory.pages, "cached", 9),
    "rows": lambda scheduler: setattr(scheduler.memory.rows, "free", 1),
    "step": lambda scheduler: setattr(scheduler, "step_number", 9),
}


@pytest.mark.parametrize("name", _SIZES)
def test_every_size_is_compared_after_every_step(name: str) -> None:
    """B05: the engine's own report equals the specified one."""
    scheduler = Scheduler(_LIMITS)
    sampling = SamplingParams(seed=3, max_new_tokens=4)
    events = tuple(Generate(rid=rid, prompt_ids=tuple(range(1, 12)), sampling=sampling) for rid in ("a", "b"))
    result = scheduler.step(events, 0.0)
    Conformance(_LIMITS).check(events, 0.0, result, scheduler)
    _SIZES[name](scheduler)
    assert _judged(result, scheduler, events) in RULES


def test_the_parts_of_a_prompt_are_compared() -> None:
    """Only a script reads them: no plan, reply or size had shown that they are not counted."""
    scheduler, events, result = _first_step()
    for request in scheduler.books.requests.values():
        request.chunks_done += 1
    assert _judged(result, scheduler, events) == "Chunks"


_CACHED = "page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=9 new=1; 3 start b prompt=9 seed=1"


def _cached(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Node]], None]) -> str:
    """The rule that is broken by a change of the cache of an engine at rest."""
    gate = Run(Schedule.parse(_CACHED))
    at_rest = gate.oracle.at_rest

    def changed(machine: Any) -> None:
        at_rest(machine)
        change(list(machine.scheduler.memory.tree.nodes()))
        at_rest(machine)

    monkeypatch.setattr(gate.oracle, "at_rest", changed)
    with pytest.raises(Nonconformance) as caught:
        gate.adapter.drive(gate)
    return caught.value.rule


def test_everything_of_the_cache_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(nodes: list[Node]) -> None:
        nodes[0].hit_count += 1

    def use(nodes: list[Node]) -> None:
        nodes[0].last_used += 100

    def swap(nodes: list[Node]) -> None:
        nodes[1].tokens = (*nodes[1].tokens[:4], 1, 2, 3, 4)

    assert [_cached(monkeypatch, change) for change in (count, use, swap)] == ["Hit count", "Use", "Evict"]


@pytest.mark.parametrize(("attribute", "rule"), [("cached", "Window evict"), ("free", "Slide")])
def test_the_window_pool_is_compared(attribute: str, rule: str) -> None:
    limits = Limits.of(EngineConfig(model="embedded-window", max_total_tokens=256), EMBEDDED_WINDOW_FACTS)
    scheduler, conformance = Scheduler(limits), Conformance(limits)
    events = (Generate(rid="a", prompt_ids=tuple(range(1, 40)), sampling=SamplingParams(max_new_tokens=4)),)
    result = scheduler.step(events, 0.0)
    window = scheduler.memory.sliding_window
    assert window is not None
    setattr(window.pages, attribute, getattr(window.pages, attribute) + 1)
    with pytest.raises(Nonconformance) as caught:
        conformance.check(events, 0.0, result, scheduler)
    assert caught.value.rule == rule


def test_which_pages_have_a_window_page_is_compared() -> None:
    limits = Limits.of(EngineConfig(model="embedded-window", max_total_tokens=256), EMBEDDED_WINDOW_FACTS)
    scheduler = Scheduler(limits)
    events = (Generate(rid="a", prompt_ids=tuple(range(1, 40)), sampling=SamplingParams(max_new_tokens=4)),)
    result = _changed(scheduler.step(events, 0.0), window_pages=(-1, 1, 2))
    with pytest.raises(Nonconformance) as caught:
        Conformance(limits).check(events, 0.0, result, scheduler)
    assert caught.value.rule == "Slide"


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (1,) if isinstance(value, tuple) else "retract"


# The part of a split prompt takes the window pages of a prefix that the queue is ordered by.
_SLIDING = (
    "model=embedded-window pp_size=2 schedule_policy={policy} page_size=64 max_total_tokens=4096 "
    "max_window_tokens=640; 1 start a prompt=1 new=1; 1 start b prompt=1216; 4 pause mode=in_place; "
    "4 start d prompt=64 new=5; 4 start f prompt=193 new=2"
)


@pytest.mark.parametrize("policy", ["dfs-weight", "lpm"])
def test_the_queue_is_ordered_by_what_is_cached_once_the_split_prompt_has_its_pages(policy: str) -> None:
    assert execute(Schedule.parse(_SLIDING.format(policy=policy))).failure is None
