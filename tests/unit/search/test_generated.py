"""Generated targets: every pair of features meets, a number is one schedule everywhere, a healthy engine keeps its
promises under them.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec
import pytest
from scripted_lockstep.space.targets import SPACE

from engine.core.scheduler.shared_prompts import LEAST_SPARED_TOKENS
from scripted import api
from scripted.core.action import Action
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.placed_action import Placed
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk import Capabilities, Limits, SchedulerAdapter
from scripted.sdk.actions import CancelRequest, SubmitRequest
from scripted.search.covering import Row, covering_rows, pairs_of
from scripted.search.execution import Prefixes, execute
from scripted.search.generated import (
    SCENARIO,
    Marks,
    Space,
    drawn_requests,
    first_of,
    generated_schedule,
    generated_target,
    number_of,
    row_of,
)
from scripted.search.strategies import extras_of
from scripted.search.targets import target_named

OUTSIDE = "examples/lockstep/outside.py"
EXAMPLE = "examples/your_scheduler/fixed.py"


def space_of(of: str) -> Space:
    return adapter_named(of).space  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("of", "first", "targets"),
    [(DEFAULT_ADAPTER, 0, 250), (DEFAULT_ADAPTER, 7000, 250), (OUTSIDE, 0, 60), (EXAMPLE, 0, 40)],
)
def test_every_pair_of_features_meets_in_the_first_targets(of: str, first: int, targets: int) -> None:
    space = space_of(of)
    missing = set(pairs_of(space.features, space.allows))
    assert len(missing) > 200
    for number in range(first, first + targets):
        on = set(row_of(number, of).items())
        missing = {pair for pair in missing if not on.issuperset(pair)}
    assert not missing


def test_every_feature_is_in_one_of_the_first_targets() -> None:
    """A short search meets each at least once: of equal levels a row takes the one that the fewest rows have."""
    levels = {(feature, level) for feature, levels in SPACE.features.items() for level in levels}
    for first in (0, 1000, 2000):
        assert levels == {
            level for number in range(first, first + 20) for level in row_of(number, DEFAULT_ADAPTER).items()
        }


def test_only_what_the_configuration_refuses_does_not_meet() -> None:
    """Each pair that is left out is refused by the engine's own configuration, with any numbers."""
    levels = [(feature, level) for feature, levels in SPACE.features.items() for level in levels]
    allowed = set(pairs_of(SPACE.features, SPACE.allows))
    refused = {pair for pair in itertools.combinations(levels, 2) if pair[0][0] != pair[1][0] and pair not in allowed}
    assert refused == {
        *((("stages", "async"), ("drafts", level)) for level in SPACE.features["drafts"]),
        *((("stages", "even-chunks"), ("chunk", level)) for level in ("off",)),
        *((("cache", "off"), ("host", level)) for level in SPACE.features["host"]),
        *((("window", window), ("host", host)) for window in ("wide", "tight") for host in ("small", "large")),
    }
    for number, pair in itertools.product(range(20), sorted(refused)):
        with pytest.raises(ValueError, match=r"needs|must be"):
            SPACE.draw(dict(pair), random.Random(number))


def test_what_is_on_is_in_the_schedule() -> None:
    """A feature that is on is seen in the line: nothing that was drawn is dropped."""
    signs = {
        ("cache", "off"): "radix_cache=False",
        ("stages", "async"): "async_scheduling=True",
        ("loras", "one"): " lora=x",
        ("grammars", "dead-end"): "dead_end=True",
        ("event-pause", "on"): " pause",
        ("event-unload-lora", "on"): " unload-lora name=",
        ("event-hold-grammars", "on"): " hold-grammars",
        ("window", "tight"): "max_window_tokens=",
        ("rids", "prefixes"): " start r-1 ",
        ("scores", "several"): " top_logprobs=",
        ("scale", "large"): "max_total_tokens=",
        ("salts", "one"): " salt=u",
        ("salts", "several"): " salt=",
    }
    met = set()
    for number in range(120):
        line = str(generated_schedule(number, DEFAULT_ADAPTER))
        for feature in row_of(number, DEFAULT_ADAPTER).items():
            if feature in signs:
                met.add(feature)
                assert signs[feature] in line, (feature, line)
    assert met == set(signs)


def test_a_number_is_one_schedule_in_every_process() -> None:
    numbers = (0, 17, 3017)
    code = (
        "from scripted.search.generated import generated_schedule\n"
        f"for n in {numbers}: print(generated_schedule(n, {DEFAULT_ADAPTER!r}))\n"
        f"print(generated_schedule(5, {OUTSIDE!r}))"
    )
    expected = [str(generated_schedule(number, DEFAULT_ADAPTER)) for number in numbers] + [
        str(generated_schedule(5, OUTSIDE))
    ]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.stdout.splitlines() == expected, done.stderr


def test_a_generated_schedule_is_read_back_from_its_line() -> None:
    for number in range(60):
        schedule = generated_schedule(number, DEFAULT_ADAPTER)
        assert Schedule.parse(str(schedule)) == schedule


def test_equal_blocks_stand_behind_different_prefixes() -> None:
    """The class that no written workload had: a block hash that ignores what is before a block."""
    marks, found = Marks(block=4, sizes=(4, 8, 12), bounds=(48,), most=40), 0
    for number in range(40):
        prompts = []
        for _, fields in drawn_requests({"sharing": "blocks"}, random.Random(number), marks):
            start = adapter_named(DEFAULT_ADAPTER).actions
            kind = next(action for action in start if action.is_start)
            prompts.append(kind(**fields).prompt_ids)  # type: ignore[attr-defined]
        blocks = {(at, prompt[at : at + 4]): prompt[:at] for prompt in prompts for at in range(0, len(prompt) - 3, 4)}
        for (at, block), before in blocks.items():
            found += any(block == other and before != ahead for (_, other), ahead in blocks.items()) and at > 0
    assert found > 40


class _Stubborn(Space):
    """A space whose numbers never make a configuration."""

    features: ClassVar = {"a": ("on",), "b": ("on",)}

    def allows(self, row: Row) -> bool:
        return True

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        raise ValueError("a must not be b")

    def workload(self, config: object, row: Row, rng: random.Random) -> Schedule:
        raise AssertionError("no test draws one")


def test_numbers_that_are_refused_are_drawn_again_and_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_named(DEFAULT_ADAPTER)
    stubborn, draws = _Stubborn(), []
    monkeypatch.setattr(type(adapter), "space", stubborn)
    with pytest.raises(HarnessError, match=r"makes no configuration in 1000 draws of .*: a must not be b"):
        generated_schedule(987_000, DEFAULT_ADAPTER)

    def seldom(row: Row, rng: random.Random) -> Schedule:
        draws.append(row)
        if len(draws) < 300:
            raise ValueError("not this time")
        return Schedule.parse("default; 1 start a prompt=3")

    monkeypatch.setattr(stubborn, "draw", seldom, raising=False)
    assert str(generated_schedule(987_001, DEFAULT_ADAPTER)) == "default; 1 start a prompt=3"


def test_rows_never_end_and_stay_within_what_is_allowed() -> None:
    features = {"a": ("1", "2"), "b": ("1", "2"), "c": ("1",), "d": ("1",)}

    def allows(row: Row) -> bool:
        return not (row.get("a") == "1" and row.get("b") == "1") and len(row) < 4

    rows = list(itertools.islice(covering_rows(features, allows, 0), 50))
    assert all(allows(row) for row in rows)
    assert {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)} == {
        tuple(sorted(pair)) for pair in pairs_of(features, allows)
    }


def test_features_that_go_with_nothing_come_alone() -> None:
    rows = covering_rows({"a": ("1", "2"), "b": ("1",)}, lambda row: len(row) < 2, 0)
    assert [dict(row) for row in itertools.islice(rows, 4)] == [{"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1"}]
    assert next(covering_rows({"a": ("1",)}, lambda row: not row, 0)) == {}


def test_a_row_is_silent_about_some_families() -> None:
    """Many features that need one setting do not bring it into most rows, and every pair of features still meets."""
    features = {f"{family}{number}": ("on",) for family in "abcdefgh" for number in range(4)}
    families = {name: name[0] for name in features}

    def share(of: dict[str, str]) -> float:
        rows = list(itertools.islice(covering_rows(features, lambda _: True, 0, families=of), 150))
        assert len({pair for row in rows for pair in itertools.combinations(sorted(row), 2)}) == 32 * 31 // 2
        return sum(any(name[0] == "a" for name in row) for row in rows) / len(rows)

    assert share(families) < 0.7 < 0.75 < share({})


def test_any_three_levels_of_some_features_meet() -> None:
    features = dict.fromkeys("abcdefgh", ("1", "2"))
    rows = list(itertools.islice(covering_rows(features, lambda _: True, 0, triples="abcd"), 60))
    threes = {
        tuple(zip(names, levels, strict=True))
        for names in itertools.combinations("abcd", 3)
        for levels in itertools.product("12", repeat=3)
    }
    assert threes == {three for row in rows for three in itertools.combinations(sorted(row.items()), 3)} & threes
    assert {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)} == {
        tuple(sorted(pair)) for pair in pairs_of(features, lambda _: True)
    }


def _starts_of(row: Row, number: int) -> list[Placed]:
    schedule = SPACE.draw(row, random.Random(number))
    return [placed for placed in schedule.placed if placed.action.is_start]


def test_a_stream_has_others_among_requests_that_are_alike() -> None:
    """The requests that starve differ from the stream in their prefix and in their other settings."""
    for number in range(10):
        starts = _starts_of({"requests": "stream", "loras": "several"}, number)
        odd = [one for one in starts if one.action.seed]  # type: ignore[attr-defined]
        assert len(odd) in (1, 2, 3)
        assert len({one.action.prompt for one in starts if one not in odd}) == 1  # type: ignore[attr-defined]
        assert {one.action.lora for one in odd} == {"y"}  # type: ignore[attr-defined]
        assert 2 <= starts.index(odd[0]) < 9 < 20 < len(starts)


def test_prompts_come_again_and_longer_in_turns() -> None:
    prompts = [
        one.action.prompt_ids  # type: ignore[attr-defined]
        for number in range(20)
        for one in _starts_of({"sharing": "turns", "requests": "several"}, number)
    ]
    again = [(one, other) for one, other in itertools.combinations(prompts, 2) if other[: len(one)] == one]
    assert any(len(one) == len(other) for one, other in again)
    assert any(len(one) < len(other) for one, other in again)


def test_time_passes_up_to_the_end_of_a_call_that_waits() -> None:
    exact = 0
    for number in range(40):
        placed = SPACE.draw({"event-flush": "on"}, random.Random(number)).placed
        waits = [(one.step, getattr(one.action, "timeout_s", None)) for one in placed]
        passed = [(one.step, one.action.seconds) for one in placed if hasattr(one.action, "seconds")]
        exact += any(step < later and wait == seconds for step, wait in waits for later, seconds in passed)
    assert exact > 5


def test_what_ends_a_run_has_something_before_it() -> None:
    for number in range(20):
        schedule = SPACE.draw({"event-kill": "on"}, random.Random(number))
        kills = [placed.step for placed in schedule.placed if placed.action.is_fatal]
        last = max(one.step for one in _starts_of({"event-kill": "on"}, number))
        assert kills
        assert min(kills) >= last // 2


def test_what_ends_a_run_often_comes_while_something_is_under_way() -> None:
    near = 0
    for number in range(40):
        placed = SPACE.draw({"event-kill": "on", "profile": "on"}, random.Random(number)).placed
        kills = [one.step for one in placed if one.action.is_fatal]
        begins = [one.step for one in placed if "profile" in one.action.kind]
        near += any(0 <= kill - begin <= 1 for kill in kills for begin in begins)
    assert near > 8


@pytest.mark.parametrize(
    ("row", "count", "sign"),
    [
        ({"stages": "async", "grammars": "some"}, 1, lambda one: one.new >= 3 and one.regex is None),
        ({"drafts": "looked-up", "penalties": "presence"}, 1, lambda one: one.new >= 20 and not one.presence),
        ({"scale": "large", "prompts": "short"}, 2, lambda one: one.prompt > LEAST_SPARED_TOKENS and one.seed == 0),
    ],
)
def test_a_setting_that_acts_on_few_requests_has_some(row: Row, count: int, sign: Callable[[Any], bool]) -> None:
    """Another setting, a grammar for instance, is on in most requests and excludes this one, but not from all."""
    met = [sum(sign(one.action) for one in _starts_of(row, number)) >= count for number in range(30)]
    assert sum(met) > 12


def test_drafts_meet_a_text_that_repeats_its_first_token() -> None:
    starts = [one.action for number in range(30) for one in _starts_of({"drafts": "looked-up"}, number)]
    assert any(one.biased == one.prompt_ids[0] and one.bias == 100 for one in starts)  # type: ignore[attr-defined]


def test_equal_prompts_come_with_other_salts() -> None:
    apart = 0
    for number in range(20):
        starts = [one.action for one in _starts_of({"salts": "several"}, number)]
        apart += any(
            one.prompt_ids == other.prompt_ids and one.salt != other.salt  # type: ignore[attr-defined]
            for one, other in itertools.combinations(starts, 2)
        )
    assert apart > 3


def test_a_prompt_is_added_again_under_each_salt_of_the_workload() -> None:
    base = Schedule.parse("default; 1 start a prompt=9 salt=u; 2 start b prompt=9 seed=1")
    twins = {(one.prompt, one.seed, one.salt) for one in extras_of(base) if one.is_start}  # type: ignore[attr-defined]
    assert {(9, 0, None), (9, 0, "u"), (9, 1, None), (9, 1, "u")} <= twins


def test_large_targets_have_prompts_that_are_worth_waiting_for() -> None:
    lengths = [one.action.prompt for number in range(10) for one in _starts_of({"scale": "large"}, number)]  # type: ignore[attr-defined]
    assert max(lengths) > 1024


def test_seeds_search_other_targets() -> None:
    assert first_of(0) == 0
    assert {str(generated_schedule(first_of(seed), DEFAULT_ADAPTER)) for seed in range(5)}.__len__() == 5


@pytest.mark.parametrize("text", ["generated:", "generated:x", "generated:-1", "generated:12345678901"])
def test_a_target_needs_its_number(text: str) -> None:
    assert number_of(generated_target(12)) == 12
    assert number_of("one-stage") is None
    with pytest.raises(ScriptDefinitionError, match=f"at most ten digits, got '{text}'"):
        target_named(text)


def test_an_adapter_without_a_space_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(adapter_named(DEFAULT_ADAPTER)), "space")
    with pytest.raises(ScriptDefinitionError, match=r"declares no space .* --corpus"):
        generated_schedule(986_000, DEFAULT_ADAPTER)


# -- searched --


@pytest.mark.parametrize("of", [DEFAULT_ADAPTER, OUTSIDE, EXAMPLE])
def test_a_healthy_scheduler_keeps_its_promises_under_generated_targets(of: str) -> None:
    for number in range(first_of(41), first_of(41) + 40):
        schedule = generated_schedule(number, of)
        failure = execute(schedule).failure
        assert failure is None, (schedule, failure)


# A draft that ends an output which its grammar completes.
DRAFTED_END = (
    "speculative_algorithm=draft_model speculative_draft_model=embedded max_total_tokens=128; "
    "1 start d prompt=1 new=7 biased=257 bias=100.0 regex=[a-c]{5}"
)


@pytest.mark.parametrize("line", [DRAFTED_END])
def test_what_generated_targets_found_stays_mended(line: str) -> None:
    assert execute(Schedule.parse(line)).failure is None


def test_a_search_without_a_target_generates_them() -> None:
    report = api.explore(schedules=5, seed=2)
    assert report.by_target == {generated_target(first_of(2) + number): 1 for number in range(5)}
    assert report.schedules == 5
    assert not report.findings


def test_the_corpus_is_searched_apart() -> None:
    report = api.explore(corpus=True, schedules=3)
    assert list(report.by_target) == list(adapter_named(DEFAULT_ADAPTER).workloads)[:3]


def test_every_event_is_added_to_a_generated_target_by_a_complete_strategy() -> None:
    report = api.explore(strategy="exhaustive", schedules=30, seed=3)
    assert list(report.by_target) == [generated_target(first_of(3))]
    assert not report.complete


def test_a_finding_of_a_generated_target_is_shrunk_and_replayed() -> None:
    report = api.explore(mutant="flush-ignores-in-flight", schedules=2000, stop_at_first=True)
    (finding,) = report.findings.values()
    assert number_of(finding.target) is not None
    shrunk = api.shrink(finding)
    assert shrunk.fails
    with adapter_named(DEFAULT_ADAPTER).switched_on(finding.mutant):
        failure = execute(Schedule.parse(str(shrunk.schedule))).failure
    assert failure is not None
    assert failure.signature == finding.failure.signature


def test_one_generated_target_in_21_shows_that_the_machine_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    twice: list[Schedule] = []
    monkeypatch.setattr(Prefixes, "_check_determinism", lambda prefixes: twice.append(prefixes.base))
    for number in range(20, 23):
        target_named(generated_target(number), is_copied=False)
    assert twice == [generated_schedule(21, DEFAULT_ADAPTER)]


class _Windowed(msgspec.Struct, frozen=True):
    """A window takes more blocks than there are by default, and a window is the only thing that a mode acts on."""

    blocks: int = 8
    window: int = 0
    mode: Literal["some", "full"] = "some"

    def __post_init__(self) -> None:
        if self.window and self.blocks < 20:
            raise ValueError("a window needs 20 blocks")


def _example_machine(_: _Windowed) -> Any:
    example = adapter_named(EXAMPLE)
    return example.new_parts(example.read_config({}), record=False)[0]


WINDOWED = SchedulerAdapter(
    f"{__name__}:WINDOWED",
    config=_Windowed,
    machine=_example_machine,
    limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=4, context_tokens=32),
    can=lambda _: Capabilities(),
    settings={"window": (3,)},
    needed={"window": {"blocks": (20, 24)}, "mode": {"window": (3,)}},
)


def test_a_setting_is_drawn_with_what_it_needs() -> None:
    assert {"blocks", "window", "mode"} <= set(WINDOWED.space.features)
    configs = [WINDOWED.space.draw({"mode": "other"}, random.Random(seed)).config for seed in range(20)]
    assert {(one.mode, one.window) for one in configs} == {("full", 3)}
    assert {one.blocks for one in configs} == {20, 24}, "what is needed needs blocks"


def test_features_that_need_one_switch_are_a_family() -> None:
    assert WINDOWED.space.families == {"window": "window", "mode": "window"}


class _Named(msgspec.Struct, frozen=True):
    method: Literal["none", "read", "drawn"] = "none"


NAMED = SchedulerAdapter(
    f"{__name__}:NAMED",
    config=_Named,
    machine=lambda _: _example_machine(_Windowed()),
    limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=4, context_tokens=32),
    can=lambda _: Capabilities(),
)


def test_each_name_of_a_setting_is_a_level() -> None:
    """So every other feature meets each of them."""
    assert NAMED.space.features["method"] == ("read", "drawn")
    for name in ("read", "drawn"):
        drawn = [NAMED.space.draw({"method": name}, random.Random(seed)).config.method for seed in range(5)]
        assert set(drawn) == {name}


class _Switched(msgspec.Struct, frozen=True):
    ordered: bool = False
    max_loras: int = 0


SWITCHED = SchedulerAdapter(
    f"{__name__}:SWITCHED",
    config=_Switched,
    machine=lambda _: _example_machine(_Windowed()),
    limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=4, context_tokens=32),
    can=lambda config: Capabilities(priority=config.ordered, loras=config.max_loras),
    settings={"max_loras": (1, 2)},
)


def test_a_kind_of_requests_is_drawn_with_the_setting_that_allows_it() -> None:
    """SGLang's targets had no priorities, because its adapter did not name the switch."""
    assert set(SWITCHED.space.features) & {"priorities", "loras", "grammars", "sessions", "images"} == {
        "priorities",
        "loras",
    }
    drawn = [
        SWITCHED.space.draw({"priorities": "some", "loras": "some", "requests": "many"}, random.Random(seed))
        for seed in range(20)
    ]
    assert {one.config.ordered for one in drawn} == {True}
    assert {one.config.max_loras for one in drawn} == {1, 2}
    for field in ("priority", "lora"):
        assert {getattr(placed.action, field) for one in drawn for placed in one.placed} >= {0, 1, 2}


def test_where_requests_meet_a_target_is_of_one_kind_and_little_else() -> None:
    crowded = SchedulerAdapter(
        f"{__name__}:CROWDED",
        config=_Windowed,
        machine=_example_machine,
        limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=4, context_tokens=32),
        can=lambda _: Capabilities(sessions=True),
        crowded={"blocks": (9, 10)},
    )
    assert crowded.space.scenes["sessions"] == {"sessions": ("some",)}
    assert list(crowded.space.scenes) == ["sessions", "sessions-alike"]
    row = {"sessions": "some", SCENARIO: "sessions"}
    drawn = [crowded.space.draw(row, random.Random(seed)) for seed in range(20)]
    assert {one.config.blocks for one in drawn} == {9, 10}
    assert any(getattr(placed.action, "session", 0) for one in drawn for placed in one.placed)
    assert not WINDOWED.space.scenes


class _MoreInput(Action, frozen=True, kw_only=True, tag="more-input"):
    """Continues a session."""

    rid: str

    part_of: ClassVar = "sessions"


PARTED = SchedulerAdapter(
    f"{__name__}:PARTED",
    config=_Windowed,
    machine=_example_machine,
    limits=lambda _: Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=4, context_tokens=32),
    can=lambda _: Capabilities(sessions=True),
    actions={_MoreInput: {}},
    crowded={"blocks": (9, 10)},
    scenes={"queues": {"requests": ("several",)}},
)


def test_the_lives_of_requests_in_a_scene_have_their_parts() -> None:
    assert list(PARTED.space.scenes) == ["sessions", "sessions-alike", "queues"]
    for seed in range(10):
        drawn = PARTED.space.draw({"sessions": "some", SCENARIO: "sessions"}, random.Random(seed))
        begun = {one.action.rid: one.step for one in drawn.placed if isinstance(one.action, SubmitRequest)}
        parts = [one for one in drawn.placed if isinstance(one.action, _MoreInput)]
        assert {one.action.rid for one in parts} == set(begun), "extras name at most four requests"
        assert all(0 < one.step - begun[one.action.rid] <= 24 for one in parts if isinstance(one.action, _MoreInput))
    others = [{"sessions": "some"}, {"requests": "several", SCENARIO: "queues"}]
    drawn_others = [PARTED.space.draw(row, random.Random(seed)) for row in others for seed in range(5)]
    assert not any(isinstance(placed.action, _MoreInput) for one in drawn_others for placed in one.placed)


def test_the_first_of_two_long_prompts_ends_among_its_chunks() -> None:
    """The second waits for its memory, and a prompt that comes back finds its own pushed out by the others."""
    row = {"requests": "rounds", "prompts": "long", "sharing": "rounds", "event-abort": "on"}
    ended = 0
    for seed in range(20):
        drawn = WINDOWED.space.draw(row, random.Random(seed))
        starts = {one.action.rid: one for one in drawn.placed if isinstance(one.action, SubmitRequest)}
        steps = [one.step for one in starts.values()]
        assert steps[::2][: len(steps) // 2] == steps[1::2]
        assert all(12 <= later - step <= 20 for step, later in itertools.pairwise(steps[::2]))
        assert [one.action.seed for one in starts.values()] == [index % 3 for index in range(len(steps))]
        limits, _ = WINDOWED.limits_of(drawn.config)
        fits = min(limits.pool_tokens, limits.context_tokens)
        assert all(one.action.prompt + one.action.new <= fits for one in starts.values()), "the others are refused"
        aborts = {one.action.rid: one.step for one in drawn.placed if isinstance(one.action, CancelRequest)}
        assert aborts.keys() <= set(list(starts)[::2])
        assert all(1 <= step - starts[rid].step <= 3 for rid, step in aborts.items())
        ended += len(aborts) / len(steps[::2]) > 0.5
    assert ended > 10
