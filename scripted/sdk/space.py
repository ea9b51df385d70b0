"""The space of generated targets for a scheduler of the usual shape: its settings, limits and capabilities."""

from __future__ import annotations

import functools
import random
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal

import msgspec
from typing_extensions import TypeVar

from scripted.core.action import Action
from scripted.core.machine import close_machine
from scripted.core.placed_action import Placed
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk.actions import SubmitRequest
from scripted.sdk.capabilities import Capabilities
from scripted.sdk.images import LARGEST_IMAGE, SMALLEST_IMAGE
from scripted.search.covering import Row
from scripted.search.generated import (
    EVENT,
    REQUEST_FEATURES,
    SCENARIO,
    Marks,
    RequestFields,
    Space,
    drawn_events,
    drawn_parts,
    drawn_requests,
    event_kinds,
)

_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct, default=Any)
_OTHER: Final = "other"
_TRIPLES: Final = ("requests", "prompts", "sharing")
# The kinds of requests, each with whether a scheduler allows it.
_OWN: Final[Mapping[str, Callable[[Capabilities], bool]]] = {
    "priorities": lambda can: can.priority,
    "loras": lambda can: bool(can.loras),
    "grammars": lambda can: bool(can.grammars),
    "sessions": lambda can: can.sessions,
    "images": lambda can: bool(can.images),
}
_PRIORITIES: Final = (0, 1, 1, 2, 5)
_GRAMMARS: Final = (0, 0, 1, 1, 1, 1, -1)
_IMAGES: Final = (0, 1, 1, 2, 3)
_LONGEST: Final = 80
_ALIKE: Final = {"sharing": ("all",), "prompts": ("alike",)}
# The share of sessions whose answer ends with a block, or a token beside it: its last token is dropped.
_WHOLE: Final = 0.5
_BESIDE_A_BLOCK: Final = (0, 1, 1, 2)
# The share of prompts with images that have hardly another token.
_ADJOINING: Final = 0.3
# The share of prompts no longer than the image beside them.
_SHORTER: Final = 0.5
# Combinations of values that are tried before settings count as refused.
_TRIES: Final = 8


class SchedulerSpace(Space, Generic[_SettingsT]):
    """The space of an adapter of the SDK.

    ``settings`` are further values of settings, by name. By itself a switch has its other value, a setting of a few
    named values has each other one as a level, and a number is halved, doubled or moved by one. A target with an event
    of ``actions`` has the settings that the event needs; the same holds for settings and kinds of requests (priorities,
    loras, grammars, images) in ``needed``. A kind of requests outside ``needed`` that the default settings do not allow
    has the first setting that alone allows it. With ``crowded`` settings, with which requests meet, some targets are
    scenes: these settings, requests of one kind, and little else; so are the adapter's own ``scenes``, each with the
    features that it needs.
    """

    def __init__(
        self,
        adapter: Adapter[_SettingsT],
        config: type[_SettingsT],
        settings: Mapping[str, Sequence[object]],
        actions: Mapping[type[Action], Mapping[str, Sequence[object]]],
        needed: Mapping[str, Mapping[str, Sequence[object]]],
        crowded: Mapping[str, Sequence[object]],
        scenes: Mapping[str, Mapping[str, tuple[str, ...]]],
    ) -> None:
        self._adapter = adapter
        self._default = config()
        self._defaults = msgspec.structs.asdict(self._default)
        hints = typing.get_type_hints(config)
        self._settings: dict[str, tuple[object, ...]] = {}
        self._has_names = {name for name, hint in hints.items() if typing.get_origin(hint) is Literal}
        for name in config.__struct_fields__:
            default = self._defaults[name]
            values = (*settings.get(name, ()), *_others(hints[name], default))
            self._settings[name] = tuple(dict.fromkeys(value for value in values if value != default))
        of_events = {EVENT + str(action.__struct_config__.tag): settings for action, settings in actions.items()}
        self._declared_needs = {**of_events, **needed, SCENARIO: crowded}
        self._is_crowded = bool(crowded)
        self._own_scenes = scenes
        self._is_possible: Callable[[_SettingsT | None], bool] = functools.lru_cache(maxsize=4096)(
            self._makes_a_machine
        )

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        """Settings, kinds of requests and of events. Raises ScriptDefinitionError if the defaults make no machine."""
        close_machine(self._adapter.new_parts(self._default, record=False)[0])
        alone = Schedule(self._default, (Placed(1, SubmitRequest(rid="a", prompt=2)),), self._adapter.name)
        return {
            **{name: tuple(levels) for name, levels in self._levels.items() if levels},
            **REQUEST_FEATURES,
            **self._declared(),
            **dict.fromkeys((*event_kinds(alone), *self._kinds_needing()), ("on",)),
        }

    @functools.cached_property
    def _levels(self) -> Mapping[str, Mapping[str, Sequence[object]]]:
        """The values of each setting by level; a setting of which no value makes a machine has no level."""
        return {name: self._levels_of(name, values) for name, values in self._settings.items()}

    def _levels_of(self, name: str, values: Sequence[object]) -> Mapping[str, Sequence[object]]:
        first = self._first_of(name)

        def is_possible(value: object) -> bool:
            return self._is_possible(self._with({**first, name: value}))

        # A name that makes a machine only beside another setting has no level of its own.
        if name in self._has_names and len(values) > 1 and all(map(is_possible, values)):
            return {str(value): (value,) for value in values}
        return {_OTHER: values} if any(map(is_possible, values)) else {}

    @functools.cached_property
    def families(self) -> Mapping[str, str]:
        """The switch that each feature needs, or that the feature is, by the feature's name."""
        switches = {name: self._switch_of(name) for name in self.features}
        heads = set(switches.values())
        return {name: switch or name for name, switch in switches.items() if switch or name in heads}

    def _switch_of(self, feature: str) -> str:
        """Return the setting that is off by default, and that a feature needs in the end; empty if it needs none."""
        for name, values in self._needed.get(feature, {}).items():
            default = self._defaults[name]
            if (not default or isinstance(default, str)) and default not in values:
                return self._switch_of(name) or name
        return ""

    @functools.cached_property
    def scenes(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """The scenes for each kind of request, by the kind's name, and the adapter's own."""
        declared = self._declared().items() if self._is_crowded else ()
        scenes = {name: {name: levels} for name, levels in declared}
        # Requests that continue equal outputs of others.
        alike = {f"{name}-alike": {**scenes[name], **_ALIKE} for name in scenes if name == "sessions"}
        return {**scenes, **alike, **self._own_scenes}

    @property
    def triples(self) -> tuple[str, ...]:
        return _TRIPLES

    def _declared(self) -> dict[str, tuple[str, ...]]:
        """The kinds of requests that the default settings allow, or the settings that those kinds need."""
        can = [self._can_of({})]
        can += [self._can_of(self._first_of(one)) for one in _OWN]
        return {kind: ("some",) for kind, allowed in _OWN.items() if any(map(allowed, can))}

    @functools.cached_property
    def _needed(self) -> Mapping[str, Mapping[str, Sequence[object]]]:
        """The settings that each feature needs, by the feature's name."""
        return {**{kind: self._allowing(kind) for kind in _OWN}, **self._declared_needs}

    def _allowing(self, kind: str) -> dict[str, tuple[object, ...]]:
        """Return the first setting that alone allows requests of a kind; nothing if the defaults allow them."""
        # A setting with the kind's own name is one feature with it.
        if kind in self._settings or _OWN[kind](self._can_of({})):
            return {}
        for name, values in self._settings.items():
            fit = tuple(value for value in values if self._allows_with(kind, {name: value}))
            if fit:
                return {name: fit}
        return {}

    def _allows_with(self, kind: str, values: Mapping[str, object]) -> bool:
        if self._with(values) is None:
            return False
        try:
            return _OWN[kind](self._can_of(values))
        except (ValueError, ScriptDefinitionError):
            return False

    def _can_of(self, values: Mapping[str, object]) -> Capabilities:
        # The defaults of a variant may rule these values out.
        config = self._with(values) or self._default
        _, can = self._adapter.limits_of(config)
        capabilities: Capabilities = can
        return capabilities

    def _kinds_needing(self) -> Iterator[str]:
        """The kinds of events that can be added once the settings that they need are set."""
        for kind in self._needed:
            if not kind.startswith(EVENT):
                continue
            config = self._with(self._first_of(kind))
            if config is None:
                # The defaults of a variant may rule it out.
                continue
            alone = Schedule(config, (Placed(1, SubmitRequest(rid="a", prompt=2)),), self._adapter.name)
            yield from (known for known in event_kinds(alone) if known == kind)

    def allows(self, row: Row) -> bool:
        """Whether some combination of these settings' values makes a machine; only a few of many are tried."""
        rng = random.Random(0)  # noqa: S311 - the same each time
        return any(self._is_possible(self._with(self._values(row, rng))) for _ in range(_TRIES))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Draw a schedule. Raises ScriptDefinitionError for settings that exclude each other."""
        config = self._with(self._values(row, rng))
        if config is None or not self._is_possible(config):
            raise ScriptDefinitionError(f"{self._adapter.name} makes no machine of these settings together")
        schedule = self.workload(config, row, rng)
        events = [*drawn_events(row, rng, schedule)]
        if row.get(SCENARIO) in self.scenes and any(action.part_of in row for action in self._adapter.actions):
            events += drawn_parts(row, rng, schedule)
        return schedule.with_placed(events)

    def workload(self, config: _SettingsT, row: Row, rng: random.Random) -> Schedule:
        """Draw the requests of a row for this configuration, without events."""
        limits, can = self._adapter.limits_of(config)
        fits = max(1, min(limits.pool_tokens, limits.context_tokens) - 2)
        if not can.chunked:
            fits = min(fits, limits.batch_tokens)
        sizes = {limits.block_size, 2 * limits.block_size, limits.batch_tokens, fits // 2, fits // 3}
        marks = Marks(
            block=limits.block_size,
            sizes=tuple(sorted(min(size, _LONGEST) for size in sizes if size)),
            bounds=tuple(sorted({min(fits + 2, _LONGEST), min(limits.batch_tokens, _LONGEST)})),
            most=min(fits, _LONGEST),
        )
        placed = []
        for step, fields in drawn_requests(row, rng, marks):
            kinds = dict(_drawn_kinds(row, rng, can, marks, fields))
            placed.append(Placed(step, SubmitRequest(**{**fields, **kinds})))
        return Schedule(config, (), self._adapter.name).with_placed(placed)

    def _values(self, row: Row, rng: random.Random) -> dict[str, object]:
        drawn = {
            name: rng.choice(self._levels[name].get(row[name], values))
            for name, values in self._settings.items()
            if name in row
        }
        needing = [*row]
        for feature in needing:
            for name, values in self._needed.get(feature, {}).items():
                if drawn.get(name) not in values:
                    drawn[name] = rng.choice(values)
                    # It may itself need others.
                    needing += [name] if drawn[name] != self._defaults[name] else []
        return drawn

    def _first_of(self, feature: str) -> dict[str, object]:
        """Return the first values of the settings that it needs, and of the settings that those need."""
        first = {name: values[0] for name, values in self._needed.get(feature, {}).items()}
        for name in [name for name, value in first.items() if value != self._defaults[name]]:
            first = {**self._first_of(name), **first}
        return first

    def _with(self, values: Mapping[str, object]) -> _SettingsT | None:
        """Return the configuration; None if it refuses these values."""
        try:
            return msgspec.structs.replace(self._default, **values)
        except ValueError:
            return None

    def _makes_a_machine(self, config: _SettingsT | None) -> bool:
        if config is None:
            return False
        try:
            self._adapter.limits_of(config)
            close_machine(self._adapter.new_parts(config, record=False)[0])
        except (ValueError, ScriptDefinitionError):
            return False
        return True


def _drawn_kinds(
    row: Row, rng: random.Random, can: Capabilities, marks: Marks, fields: RequestFields
) -> Iterator[tuple[str, int]]:
    """Draw the fields of a request's kinds, and the sizes that go with them."""
    if "priorities" in row and can.priority:
        yield "priority", rng.choice(_PRIORITIES)
    if "loras" in row and can.loras:
        yield "lora", rng.randint(0, can.loras)
    grammar = rng.choice(_GRAMMARS) if "grammars" in row and can.grammars else 0
    if grammar:
        yield "grammar", grammar
    if "sessions" in row and can.sessions and not grammar and rng.choice((0, 1, 1)):
        yield "session", 1
        if rng.random() < _WHOLE:
            whole = -fields["prompt"] % marks.block + rng.choice((0, marks.block))
            yield "new", max(1, whole + rng.choice(_BESIDE_A_BLOCK))
    images = rng.choice(_IMAGES) if can.images and ("images" in row or can.images_beside) else 0
    if images:
        yield "images", images
        if can.images_beside and rng.random() < _SHORTER:
            yield "prompt", rng.randint(SMALLEST_IMAGE, LARGEST_IMAGE)
        elif images > 1 and rng.random() < _ADJOINING:
            yield "prompt", min(images * LARGEST_IMAGE + rng.choice((0, 1, 2)), marks.most)


def _others(hint: object, default: object) -> tuple[object, ...]:
    """Return other values for a setting of this type."""
    if isinstance(default, bool):
        return (not default,)
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if isinstance(default, int):
        return tuple(value for value in (default // 2, default - 1, default + 1, 2 * default) if value >= 0)
    return ()
