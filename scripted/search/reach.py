"""The reach of a failure: the least unusual settings that show it, how often random work does, and its cause.

A shrunk schedule has few events in small settings; its reach shows whether a production server can meet the failure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from scripted.core.action import Action, Culprit, rid_of
from scripted.core.placed_action import Placed
from scripted.core.protocol import ConfigValue
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.core.server_description import DescribesServer, ServerDescription, UndescribedServer
from scripted.search.covering import Row
from scripted.search.execution import Failure, execute
from scripted.search.generated import EVENT, REQUEST_FEATURES, GeneratesTargets, Space, drawn_events, tag_of
from scripted.search.shrinking import shrink, way_to_fail

WORKLOADS: Final = 200
# How many random workloads to try with settings under which the events themselves do not fail.
_TRIES: Final = 40
_SHRINK_S: Final = 2.0
# The share of request features that a workload has.
_FEATURES: Final = 0.3
# These workloads choose no request ids: whether clients must choose them is one of the questions.
_NAMES: Final = "rids"
# Fields of a request that are drawn only if the row has the feature.
_FEATURE_OF: Final = {
    "priority": "priorities",
    "lora": "loras",
    "grammar": "grammars",
    "session": "sessions",
    "images": "images",
}
_FACTORS: Final = (2, 4, 8)
# Token counts of an action, which scale with the settings that count tokens.
_TOKENS: Final = ("prompt", "shared", "tokens")


class Neighbour(msgspec.Struct, frozen=True):
    """Neighbouring settings: whether the events fail under them, and ``failed`` of ``workloads`` random workloads."""

    words: str
    fails: bool
    failed: int = 0
    workloads: int = 0

    def __str__(self) -> str:
        if self.fails:
            return f"{self.words}: fails"
        if self.failed:
            return f"{self.words}: fails with other requests ({self.failed} of {self.workloads} random workloads)"
        return f"{self.words}: passes, and so do {self.workloads} random workloads"


class MeasuredReach(msgspec.Struct, frozen=True):
    """``schedule`` has the least unusual settings that still fail; ``unusual`` names the settings off their defaults.

    Under these settings, ``failed`` of ``workloads`` random workloads fail in the same way. ``needs_names``: only with
    request ids that clients choose. ``ends_engine``: the scheduler raises, so it serves no further request.
    """

    schedule: Schedule
    unusual: Mapping[str, ConfigValue]
    neighbours: tuple[Neighbour, ...]
    workloads: int
    failed: int
    culprits: tuple[Culprit, ...]
    needs_names: bool
    ends_engine: bool

    @property
    def who(self) -> str:
        """Describe the party that can cause the failure."""
        others = [culprit for culprit in self.culprits if culprit is not Culprit.CLIENT]
        if others:
            return " and ".join(others)
        if self.needs_names:
            return str(Culprit.NAMED_CLIENT)
        return f"{Culprit.CLIENT} (remote crash)" if self.ends_engine else str(Culprit.CLIENT)


def server_of(schedule: Schedule) -> ServerDescription:
    """Return the description of the server of a schedule's adapter."""
    adapter = schedule.adapter
    return adapter.server if isinstance(adapter, DescribesServer) else UndescribedServer(adapter)


def reach_of(schedule: Schedule, *, workloads: int = WORKLOADS) -> MeasuredReach:
    """Find the reach of a failing schedule. Raises ScriptDefinitionError for a passing one."""
    _, failure = way_to_fail(schedule, None)
    if failure is None:
        raise ScriptDefinitionError(f"{str(schedule)!r} does not fail, so it has no reach to measure")
    least = _least_unusual(schedule, failure.signature)
    failed, drawn = _rate(least, failure.signature, workloads)
    return MeasuredReach(
        schedule=least,
        unusual=server_of(least).unusual(least.config),
        neighbours=tuple(_neighbours(least, failure.signature)),
        workloads=drawn,
        failed=failed,
        culprits=tuple(dict.fromkeys(placed.action.culprit for placed in least.placed)),
        needs_names=not _fails(_with_plain_names(least), failure.signature),
        ends_engine=bool(failure.place),
    )


def _least_unusual(schedule: Schedule, signature: str) -> Schedule:
    """Set one unusual setting after another to the server's default, with other requests if that needs them."""
    for _, config in server_of(schedule).usual_configs(schedule.config):
        candidate = schedule.with_config(config)
        if _fails(candidate, signature):
            return _least_unusual(candidate, signature)
        other = next((one for one in _random_work(candidate, _TRIES) if _fails(one, signature)), None)
        if other is not None:
            return _least_unusual(shrink(other, signature, budget_s=_SHRINK_S).schedule, signature)
    return schedule


def _neighbours(schedule: Schedule, signature: str) -> Iterator[Neighbour]:
    server = server_of(schedule)
    for words, config in (*server.usual_configs(schedule.config), *server.other_configs(schedule.config)):
        yield _tried(words, schedule.with_config(config), signature)
    for factor in _FACTORS:
        config = server.scaled(schedule.config, factor)
        if config is not None:
            larger = schedule.with_config(config).of_placed(
                Placed(one.step, _scaled(one.action, factor)) for one in schedule.placed
            )
            yield _tried(f"all sizes {factor} times as large", larger, signature)


def _tried(words: str, schedule: Schedule, signature: str) -> Neighbour:
    if _fails(schedule, signature):
        return Neighbour(words, fails=True)
    failed, drawn = _rate(schedule, signature, _TRIES)
    return Neighbour(words, fails=False, failed=failed, workloads=drawn)


def _scaled(action: Action, factor: int) -> Action:
    values = msgspec.structs.asdict(action)
    return msgspec.structs.replace(action, **{name: values[name] * factor for name in _TOKENS if values.get(name)})


def _fails(schedule: Schedule, signature: str) -> bool:
    failure = _failure_of(schedule)
    return failure is not None and failure.signature == signature


def _failure_of(schedule: Schedule) -> Failure | None:
    """Return how a schedule fails; None if it passes, or if its settings make no machine."""
    try:
        return execute(schedule).failure
    except (ValueError, HarnessError, ScriptDefinitionError):
        return None


def _rate(schedule: Schedule, signature: str, count: int) -> tuple[int, int]:
    """Run random workloads under these settings; return how many failed in this way and how many ran."""
    drawn = list(_random_work(schedule, count))
    return sum(_fails(one, signature) for one in drawn), len(drawn)


def _random_work(schedule: Schedule, count: int) -> Iterator[Schedule]:
    """Yield workloads with a schedule's settings and its kinds of requests and events, deterministically."""
    adapter = schedule.adapter
    if not isinstance(adapter, GeneratesTargets):
        return
    actions = [placed.action for placed in schedule.placed]
    needed = _features_of([action for action in actions if action.is_start], adapter.space)
    kinds = {EVENT + tag_of(action): "on" for action in actions if not action.is_start}
    for number in range(count):
        rng = random.Random(number)  # noqa: S311 - the same each time
        row = {
            name: rng.choice(levels)
            for name, levels in REQUEST_FEATURES.items()
            if name != _NAMES and rng.random() < _FEATURES
        }
        try:
            drawn = adapter.space.workload(schedule.config, {**row, **needed}, rng)
            yield drawn.with_placed(list(drawn_events(kinds, rng, drawn)))
        except (ValueError, ScriptDefinitionError):
            continue  # some kind has no addition to these requests


def _features_of(starts: Sequence[Action], space: Space) -> Row:
    """Return the features of these requests, each with its first level."""
    fields = [msgspec.structs.asdict(start) for start in starts]
    given = [feature for name, feature in _FEATURE_OF.items() if any(one.get(name) for one in fields)]
    return {feature: space.features[feature][0] for feature in given if feature in space.features}


def _with_plain_names(schedule: Schedule) -> Schedule:
    """Give each request a unique name that is not a prefix of another."""
    names: dict[str, str] = {}
    placed = []
    for number, one in enumerate(schedule.placed):
        action, rid = one.action, rid_of(one.action)
        if rid is not None:
            if action.is_start:
                names[rid] = f"{chr(ord('a') + number % 26)}{number:03}"
            action = msgspec.structs.replace(action, rid=names.get(rid, rid))
        placed.append(Placed(one.step, action))
    return schedule.of_placed(placed)
