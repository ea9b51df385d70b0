"""The space of the engine's generated targets: its settings, the arguments of requests, and events."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from engine.core.config import EMBEDDED_MODEL, EMBEDDED_WINDOW_MODEL, EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import Limits
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search.covering import Row
from scripted.search.generated import (
    REQUEST_FEATURES,
    SCENARIO,
    Marks,
    Space,
    drawn_events,
    drawn_requests,
    event_kinds,
)
from scripted_lockstep.actions import (
    BeginProfile,
    EndProfile,
    Evict,
    HoldGrammars,
    LoraLoad,
    ReleaseGrammars,
    ReleaseLoras,
    StartRequest,
)
from scripted_lockstep.configs import limits_of
from scripted_lockstep.space.rare_scenarios import (
    MOST_PARTS,
    PREEMPTING,
    RARE_SCENARIOS,
    REORDERING_POLICIES,
    SCENES,
    least_spared,
    scenario_additions,
)

_Drawn = dict[str, Any]

# Settings by feature and level, each with the values to draw from.
_SETTINGS: Final[Mapping[str, Mapping[str, Mapping[str, tuple[Any, ...]]]]] = {
    "stages": {
        "two": {"pp_size": (2,)},
        "more": {"pp_size": (3, 4)},
        "even-chunks": {"pp_size": (2, 4), "dynamic_chunking": (True,), "chunk_parity_tokens": (4, 16, 40)},
        "async": {"async_scheduling": (True,)},
    },
    "depth": {"deeper": {"pp_async_depth": (1, 2)}},
    "microbatch": {"few": {"pp_max_micro_batch_size": (1, 2, 3)}},
    "page": {"one": {"page_size": (1,)}, "two": {"page_size": (2,)}, "large": {"page_size": (8, 16)}},
    "mixed": {"on": {"mixed_chunk": (True,)}},
    "rows": {"one": {"max_running_requests": (1,)}, "few": {"max_running_requests": (2, 3)}},
    "queue": {"short": {"max_queued_requests": (1, 2, 3)}},
    "waiting": {"limited": {"waiting_timeout_s": (0.5, 1.0, 2.0)}},
    "policy": {
        **{name: {"schedule_policy": (name,)} for name in REORDERING_POLICIES},
        PREEMPTING: {"schedule_policy": ("priority",), "priority_preemption": (True,)},
    },
    "kept-grammars": {"few": {"max_cached_grammars": (0, 1)}},
    "cache": {"off": {"radix_cache": (False,)}},
    "drafts": {
        "looked-up": {
            "speculative_algorithm": ("ngram",),
            "speculative_ngram_min": (1, 1, 2),
            "speculative_num_draft_tokens": (1, 3, 4, 6),
        },
        "of-one-token": {
            "speculative_algorithm": ("ngram",),
            "speculative_ngram_min": (1,),
            "speculative_ngram_max": (1,),
            "speculative_num_draft_tokens": (1, 2),
        },
        "of-a-model": {
            "speculative_algorithm": ("draft_model",),
            "speculative_draft_model": (EMBEDDED_MODEL,),
            "speculative_num_draft_tokens": (1, 2, 4),
        },
    },
    "loras": {"one": {"max_loras": (1,)}, "several": {"max_loras": (2, 3)}},
    "seed": {"other": {"seed": (1, 7)}},
}
# Levels whose values are drawn from other sizes; None stands for the default.
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "chunk": ("page", "ragged", "small", "roomy", "off"),
    "budget": ("small",),
    "pool": ("tight", "least"),
    "window": ("wide", "tight"),
    "host": ("small", "large"),
    "context": ("short",),
    # Runs take about thirty times as long.
    "scale": ("large",),
}
# Any three levels of these are combined too: scarce resources, and the ways to free them.
_TRIPLES: Final = ("stages", "pool", "policy", "host", "window", "rows", "requests", "sharing", "stops")
_ENDS: Final = 257
_REGEXES: Final = ("[a-c]{2}", "[a-c]{5}", "[p-z]{3}", "[a-z]{3}x[0-9]{5}", "[a-a]{9}")
# Arguments of requests; each level draws fields.
_KINDS: Final[Mapping[str, Mapping[str, Callable[[random.Random, _Drawn], _Drawn]]]] = {
    "sampling": {
        "drawn": lambda rng, _: {"temperature": rng.choice((0.5, 1.0)), "draw": rng.choice((None, 0, 3))},
        "bounded": lambda rng, _: {
            "temperature": 1.0,
            "draw": rng.choice((None, 2, 2)),
            **rng.choice(({"min_p": 0.05}, {"min_p": 0.5}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 1}, {"top_k": 5})),
        },
    },
    "penalties": {
        "frequency": lambda rng, _: {"penalty": rng.choice((-1.0, 0.5, 2.0))},
        "presence": lambda rng, _: {"presence": rng.choice((-1.0, 0.5, 2.0))},
        "repetition": lambda rng, _: {"repetition": rng.choice((0.5, 1.5, 2.0))},
    },
    "bias": {
        "end": lambda rng, _: {"biased": _ENDS, "bias": 100.0, "new_least": rng.choice((0, 1, 2, 4))},
        "ignored-end": lambda _rng, _: {"biased": _ENDS, "bias": 100.0, "ignore_eos": True},
        "stop": lambda rng, _: {"biased": 40, "bias": 100.0, "stop": 40, "new_least": rng.choice((0, 1, 2, 4))},
        "any": lambda rng, _: {"biased": rng.choice((33, 34, 80)), "bias": rng.choice((-100.0, 1.0, 100.0))},
    },
    "scores": {
        "some": lambda rng, drawn: {"logprobs_from": rng.choice((0, 1, drawn["prompt"] // 2, drawn["prompt"] - 1))},
        "only": lambda rng, drawn: {"logprobs_from": rng.choice((0, drawn["prompt"] // 2)), "new": 0},
        "several": lambda rng, drawn: {
            "logprobs_from": rng.choice((None, 0, drawn["prompt"] // 2)),
            "top_logprobs": rng.choice((1, 2, 5)),
        },
    },
    "no-output": {"some": lambda _rng, _: {"new": 0}},
    "priorities": {"some": lambda rng, _: {"priority": rng.choice((0, 1, 1, 2, 5))}},
    "time-limit": {
        "whole": lambda rng, _: {"timeout_s": rng.choice((0.5, 1.0, 2.0))},
        "waiting": lambda rng, _: {"waiting_timeout_s": rng.choice((0.5, 1.0, 3.0))},
    },
    "grammars": {
        "some": lambda rng, drawn: {"regex": rng.choice(_REGEXES), "new": max(drawn["new"], rng.choice((2, 6, 9)))},
        "dead-end": lambda rng, drawn: {
            "regex": rng.choice(_REGEXES),
            "dead_end": True,
            "new": max(drawn["new"], rng.choice((4, 12))),
        },
    },
    "salts": {"one": lambda _rng, _: {"salt": "u"}, "several": lambda rng, _: {"salt": rng.choice(("u", "v"))}},
}
_HELD_GRAMMARS: Final = "held-grammars"
_HOLD_LORAS: Final = "event-hold-loras"
_PROFILE: Final = "profile"
# Events that need a kind of request or a setting, which is enabled with them.
_NEEDS: Final = {
    "event-hold-grammars": ("grammars", "some"),
    "event-fail-grammar": ("grammars", "some"),
    "event-load-lora": ("loras", "one"),
    _HOLD_LORAS: ("loras", "one"),
    "event-unload-lora": ("loras", "several"),
    "event-advance": ("time-limit", "whole"),
    _HELD_GRAMMARS: ("grammars", "some"),
}
# Features that interact with few others: a feature at a level, or at any, and its usual companions.
_OFTEN_WITH: Final[tuple[tuple[str, str | None, str, str], ...]] = (
    ("mixed", None, "chunk", "ragged"),
    ("mixed", None, "page", "one"),
    ("stages", "async", "pool", "least"),
    ("stages", "async", "outputs", "long"),
    ("stages", "async", "depth", "deeper"),
    ("host", None, "salts", "several"),
    ("scale", None, "salts", "several"),
    ("scale", None, "loras", "several"),
)
_OFTEN: Final = 0.3
# One engine in this many publishes KV events.
_KV_EVENTS_EVERY: Final = 4
# Of the requests with prompt lookup, one in this many has two-byte ids, and emits one of their bytes as an id.
_LOOKED_UP: Final = ("looked-up", "of-one-token")
_WIDE_EVERY: Final = 3
# One request in this many has choices.
_CHOICES_EVERY: Final = 23
# Of the engines that mix prompts and decodes, one in this many bounds gaps in milliseconds.
_GAP_BOUND_EVERY: Final = 3
# Of the others, one in this many bounds them in steps.
_GAP_STEPS_EVERY: Final = 4
_MAX_GAP_MS: Final = 100
_MAX_GAP_STEPS: Final = 3
# Requests of other policies have priorities only if they were drawn.
_IMPLIED: Final = {"priority": "some", "preempting": "some"}
_SHARE_WITH_KIND: Final = 0.6
# Sizes of a pool in tokens.
_POOLS: Final = {None: (96, 128, 200), "tight": (36, 40, 44, 48, 56), "least": (16, 20, 24, 28)}
_WINDOWED_POOLS: Final = {None: (512, 640), "tight": (224, 256, 320), "least": (112, 128, 160)}
_LARGE_POOLS: Final = {None: (4096, 8192), "tight": (1536, 2048, 2560), "least": (768, 1024)}
_LONG_OUTPUT: Final = 100
_SHARE_WITH_COMPANIONS: Final = 0.7
_LONGEST: Final = 60
_LONGEST_WINDOWED: Final = 150
_LONGEST_LARGE: Final = 1500


class EngineSpace(Space):
    """A space of hand-written tables.

    ``SchedulerSpace`` of the SDK varies each setting by itself; here a level of a feature sets several that act only
    together, with requests that exercise them.
    """

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        return {
            **{name: tuple(levels) for name, levels in _SETTINGS.items()},
            **_SIZES,
            **REQUEST_FEATURES,
            # A stream takes as long as ten others, so it is a scene.
            "requests": ("one", "several", "many"),
            **{name: tuple(levels) for name, levels in _KINDS.items()},
            _HELD_GRAMMARS: ("on",),
            _PROFILE: ("on",),
            **dict.fromkeys(event_kinds(_with_everything()), ("on",)),
        }

    @property
    def triples(self) -> tuple[str, ...]:
        return _TRIPLES

    @property
    def rare_scenarios(self) -> tuple[str, ...]:
        """Scenarios that only add to a target."""
        return RARE_SCENARIOS

    @property
    def scenes(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Scenarios with features of their own."""
        return SCENES

    def allows(self, row: Row) -> bool:
        return _makes_a_config(tuple(_config_levels(_with_needed(row)).items()))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Raises ConfigError, and ValueError for events without an effect at these numbers."""
        row = _with_needed(row)
        for feature, level, other, its_level in _OFTEN_WITH:
            if feature in row and row[feature] == (level or row[feature]) and rng.random() < _OFTEN:
                row = {other: its_level, **row}
        schedule = self.workload(_config(row, rng), row, rng)
        limits = limits_of(schedule.config)
        schedule = schedule.with_placed(_passing_events(row, rng, schedule, limits))
        schedule = schedule.with_placed(list(drawn_events(row, rng, schedule)))
        if SCENARIO in row:
            schedule = schedule.with_placed(list(scenario_additions(row[SCENARIO], rng, schedule, limits)))
        return schedule

    def workload(self, config: EngineConfig, row: Row, rng: random.Random) -> Schedule:
        """Draw the requests of a row for this configuration, and the LoRAs and holds that they need."""
        limits = limits_of(config)
        longest = _LONGEST_LARGE if "scale" in row else _LONGEST_WINDOWED if limits.window_tokens else _LONGEST
        marks = _marks(limits, longest, is_long="prompts" in row)
        placed = list(_first_events(row))
        first = 3 if placed else 0
        row = _with_sharing(row, rng)
        starts = list(drawn_requests(row, rng, marks))
        kinds = {name: row[name] for name in _KINDS if name in row}
        for name in kinds:
            for index in _requests_with(row, rng, [fields for _, fields in starts]):
                fields = starts[index][1]
                fields |= _KINDS[name][row[name]](rng, fields)
        for _, fields in starts:
            _make_effective(row, rng, fields)
        if row.get("requests") != "one" and rng.random() < _SHARE_WITH_COMPANIONS:
            starts += _companions(row, rng, limits)
        for index, (step, fields) in enumerate(starts):
            if "loras" in row and row.get("requests") == "stream":
                fields["lora"] = "y" if fields["seed"] else "x"
            elif "loras" in row and (index == 0 or rng.random() < 0.8):
                fields["lora"] = rng.choice(("x", "x", "y")) if index else "x"
            placed.append(Placed(first + step, StartRequest(**fields)))
        return Schedule(config, (), DEFAULT_ADAPTER).with_placed(placed)


SPACE: Final = EngineSpace()


def _requests_with(row: Row, rng: random.Random, starts: Sequence[_Drawn]) -> Sequence[int]:
    """Choose the requests that get a kind, at least one; in a stream often all equal prompts, or all others."""
    if row.get("requests") == "stream" and rng.random() < 0.7:
        alike = rng.random() < 0.5
        return [index for index, fields in enumerate(starts) if (fields["seed"] == 0) is alike]
    drawn = {rng.randrange(len(starts)), *(i for i in range(len(starts)) if rng.random() < _SHARE_WITH_KIND)}
    return sorted(drawn)


def _companions(row: Row, rng: random.Random, limits: Limits) -> Iterator[tuple[int, _Drawn]]:
    """Yield plain requests, because other features of a request disable some settings."""
    salt = {"salt": rng.choice(("u", "v"))} if "salts" in row and rng.random() < 0.5 else {}
    if row.get("stages") == "async":
        for number in range(rng.randint(1, 3)):
            prompt = rng.randint(1, 2 * limits.page_size + 1)
            new = rng.choice((3, 5, 9, 14))
            fields: _Drawn = {"rid": f"p{number}", "prompt": prompt, "new": new, "seed": 0, **salt}
            if rng.random() < 0.3:
                fields |= {"stop": 40, "biased": 40, "bias": 100.0, "new_least": rng.choice((1, 2, 4))}
            yield rng.randint(1, 9), fields
    if "drafts" in row:
        # After enough wrong guesses in a row, drafting rests for 64 tokens.
        room = limits.total_pages * limits.page_size // 2
        new = max(1, min(rng.choice((9, 20, _LONG_OUTPUT)), room))
        yield rng.randint(1, 9), {"rid": "p3", "prompt": rng.randint(1, 9), "new": new, "seed": 0, "ignore_eos": True}
    if "scale" in row:
        step, prompt = rng.randint(1, 6), least_spared(limits) + 1 + rng.choice((-1, 0, 1, 2, 4)) * limits.page_size
        for number in range(rng.choice((2, 2, 3))):
            fields = {"rid": f"p{4 + number}", "prompt": prompt, "new": rng.randint(1, 3), "seed": 0}
            yield step, fields | (salt if number else {})
            step += rng.choice((0, 0, 1, 1, 2))


def _with_needed(row: Row) -> Row:
    """Add the features that the row's events need, unless the row has them at another level."""
    needed = dict(_NEEDS[name] for name in row if name in _NEEDS)
    if row.get("policy") in _IMPLIED:
        needed["priorities"] = _IMPLIED[row["policy"]]
    return {**needed, **row}


def _config_levels(row: Row) -> dict[str, str]:
    return {name: level for name, level in row.items() if name in _SETTINGS or name in _SIZES}


@functools.lru_cache(maxsize=16384)
def _makes_a_config(levels: tuple[tuple[str, str], ...]) -> bool:
    rng = random.Random(0)  # noqa: S311 - which numbers does not matter
    try:
        limits_of(_config(dict(levels), rng))
    except ConfigError:
        return False
    return True


def _config(row: Row, rng: random.Random) -> EngineConfig:
    """Raises ConfigError."""
    values: _Drawn = {"page_size": rng.choice((4, 4, 4, 8)), "max_running_requests": rng.choice((4, 8, 64))}
    for name, levels in _SETTINGS.items():
        if name in row:
            values |= {setting: rng.choice(choices) for setting, choices in levels[row[name]].items()}
    if "mixed" in row and row.get("chunk") == "small" and "page" not in row:
        # With chunks of one token, decodes and prompts share them.
        values["page_size"] = rng.choice((2, 2, 4, 8))
    large, windowed = "scale" in row, row.get("window")
    if large and "stages" not in row:
        # A long prompt waits for an equal one only while it is in flight.
        values["pp_size"] = rng.choice((1, 2, 2, 2, 4))
    page = values["page_size"] = values["page_size"] * (16 if large else 1)
    values["max_total_tokens"] = max(2 * page, rng.choice(_pools_of(row)[row.get("pool")]))
    values["chunked_prefill_size"] = chunk = rng.choice(_chunk_sizes(row.get("chunk"), page, large=large))
    if "budget" in row or (windowed and chunk == -1):
        # The budget of a microbatch: below a chunk, or without chunks exactly a prompt of usual length.
        values["max_prefill_tokens"] = rng.choice(
            (20, 33, 64) if chunk == -1 else (max(1, chunk - 1), max(1, chunk // 2))
        )
    if "host" in row:
        values["host_kv_tokens"] = page * rng.choice((1, 2, 5) if row["host"] == "small" else (16, 64))
    if "context" in row:
        values["context_length"] = rng.choice((16, 24, 31, 40))
    if windowed:
        values["model"] = EMBEDDED_WINDOW_MODEL
    # Settings that are drawn from the others change no other target.
    drawn = zlib.crc32(repr(sorted(values.items())).encode())
    if values.get("radix_cache", True) and not drawn % _KV_EVENTS_EVERY:
        values["kv_events"] = True
    if "mixed" in row and chunk != -1 and not drawn % _GAP_BOUND_EVERY:
        values["max_gap_ms"] = _MAX_GAP_MS
    elif "mixed" in row and chunk != -1 and not drawn % _GAP_STEPS_EVERY:
        values["max_gap_steps"] = _MAX_GAP_STEPS
    config = EngineConfig(**values)
    if windowed != "tight":
        return config
    return EngineConfig(**values, max_window_tokens=page * _tight_window_pages(config, rng))


def _pools_of(row: Row) -> dict[str | None, tuple[int, ...]]:
    """Return the sizes of the pool by its level, in tokens."""
    if "scale" in row:
        return _LARGE_POOLS
    return _WINDOWED_POOLS if row.get("window") else _POOLS


def _tight_window_pages(config: EngineConfig, rng: random.Random) -> int:
    """Draw a number of window pages at or just above one row's."""
    limits = limits_of(config)
    most = min(limits.most_window_pages, limits.total_pages)
    return min(most, limits.row_window_pages + rng.choice((0, 0, 1, 2, 4)))


def _with_sharing(row: Row, rng: random.Random) -> Row:
    """Make the prompts of a row share tokens if one of its other features has no effect otherwise."""
    if "sharing" in row or rng.random() >= (0.8 if "scale" in row else 0.5):
        return row
    if "scale" in row:
        # Only long prompts that come together are worth waiting for.
        return {"prompts": "alike", "arrival": rng.choice(("together", "in-line")), **row, "sharing": "all"}
    # Evicted or salted prefixes matter only for a repeated prompt.
    return {**row, "sharing": "all"} if "host" in row or "salts" in row else row


def _chunk_sizes(level: str | None, page: int, *, large: bool) -> tuple[int, ...]:
    return {
        None: (256, 512, 1024) if large else (16, 16, 24, 32),
        "page": (page,),
        "ragged": (page + 1, 2 * page - 1, 3 * page + 1, 18, 21),
        "small": (max(1, page // 2), max(1, page - 1)),
        "roomy": (1024, 2048) if large else (128, 512),
        "off": (-1,),
    }[level]


def _make_effective(row: Row, rng: random.Random, fields: _Drawn) -> None:
    """In half of the requests, make the output guessable for drafts, or make it contain the stop token."""
    if "drafts" in row and fields["new"] and rng.random() < 0.5:
        fields["new"] = max(fields["new"], rng.choice((8, 14, 20, 30)))
        if "biased" not in fields and rng.random() < 0.3:
            # It repeats the first token of its prompt.
            fields |= {"biased": StartRequest(**fields).prompt_ids[0], "bias": 100.0}
    if "stop" in fields and "biased" not in fields and rng.random() < 0.5:
        fields |= {"biased": fields["stop"], "bias": 100.0, "new_least": rng.choice((0, 1, 2, 4))}
    is_plain = row.get("drafts") in _LOOKED_UP and "bias" not in row and "stop" not in fields
    if is_plain and not zlib.crc32(repr(sorted(fields.items())).encode()) % _WIDE_EVERY:
        # Drawn from the other fields, it changes no other request.
        fields |= {"wide": True, "biased": 1, "bias": 100.0}
    if "rids" not in row and not zlib.crc32(repr(sorted(fields.items())).encode()) % _CHOICES_EVERY:
        fields["n"] = 2 + fields["prompt"] % 2


def _marks(limits: Limits, longest: int, *, is_long: bool) -> Marks:
    pool = limits.total_pages * limits.page_size
    # A decode needs room as well.
    fits = max(1, min(pool, limits.context_length) - 2)
    if not limits.chunking:
        fits = min(fits, limits.prefill_budget_tokens)
    budget = limits.prefill_budget_tokens
    sizes = {limits.page_size, 2 * limits.page_size, 3 * limits.page_size, min(budget, longest), fits // 2, fits // 3}
    if limits.window_tokens:
        sizes |= {
            limits.window_tokens,
            limits.window_tokens + limits.page_size,
            limits.window_pages * limits.page_size // 2,
        }
    bounds = {pool, min(budget, 2 * longest), min(limits.context_length, 2 * longest)}
    most = min(fits, longest * 2 if is_long else longest)
    if limits.chunking:
        # More chunks of a prompt add nothing new, and take most of the time.
        most = min(most, MOST_PARTS * budget)
        bounds = {bound for bound in bounds if bound <= 2 * MOST_PARTS * budget}
    return Marks(
        block=limits.page_size,
        sizes=tuple(sorted(size for size in sizes if size > 0)),
        bounds=tuple(sorted(bounds or {most})),
        most=most,
    )


def _first_events(row: Row) -> Iterator[Placed]:
    if "loras" in row:
        yield Placed(1, LoraLoad(name="x"))
        yield Placed(1, LoraLoad(name="y", seed=2))
    if _HELD_GRAMMARS in row:
        yield Placed(1, HoldGrammars())


def _passing_events(row: Row, rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """Yield events for the row: clock advances for limits, evictions for a host tier, releases of held answers."""
    if "time-limit" in row or limits.waiting_timeout_s is not None:
        for _ in range(rng.randint(1, 3)):
            step = rng.randint(2, schedule.last_step + 9)
            yield Placed(step, AdvanceClock(seconds=rng.choice((0.25, 0.5, 0.5, 1.0, 2.0))))
    if limits.max_gap_s is not None or limits.max_gap_steps is not None:
        for step in range(2, schedule.last_step + 4):
            seconds = (limits.max_gap_s or _MAX_GAP_MS / 1000) * rng.choice((0.25, 0.5, 1, 2, 4))
            yield Placed(step, AdvanceClock(seconds=seconds))
    if "host" in row:
        for _ in range(rng.randint(0, 2)):
            yield Placed(rng.randint(2, schedule.last_step + 1), Evict(pages=rng.choice((None, None, 1, 2))))
    if _PROFILE in row:
        step = 0
        for kind in (BeginProfile, EndProfile, BeginProfile, EndProfile)[: rng.randint(1, 4)]:
            step += rng.randint(1, 6)
            yield Placed(step, kind())
    if _HELD_GRAMMARS in row:
        for _ in range(rng.randint(1, 3)):
            step = rng.randint(2, schedule.last_step + 9)
            yield Placed(step, ReleaseGrammars(count=rng.choice((None, 1, 1))))
    if _HOLD_LORAS in row:
        for _ in range(rng.randint(1, 3)):
            yield Placed(rng.randint(2, schedule.last_step + 9), ReleaseLoras(count=rng.choice((None, 1, 1))))


def _with_everything() -> Schedule:
    """Return a schedule with a request of every kind, to which every kind of event can be added."""
    config = EngineConfig(model=EMBEDDED_WINDOW_MODEL, max_loras=1, waiting_timeout_s=1.0, max_total_tokens=1024)
    start = StartRequest(rid="a", prompt=9, regex="[a-c]{2}", lora="x", timeout_s=1.0)
    return Schedule(config, (Placed(1, start),), DEFAULT_ADAPTER)
