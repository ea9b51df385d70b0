"""Generated targets for fleets: the targets of one machine, spread over several, and link events."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Generic

from scripted.core.common_actions import AdvanceClock
from scripted.core.machine import ConfigT
from scripted.core.placed_action import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.fleets.actions import clause_of
from scripted.fleets.machine import FleetConfig, fleet_adapter
from scripted.search.conversations import drawn_turns
from scripted.search.covering import Row
from scripted.search.generated import EVENT, Space, drawn_events

_FLEETS: Final = ("p0,d0", "p0,d0", "p0,p1,d0", "p0,d0,d1", "p0,p1,d0,d1")
# The share of targets with further turns, which may go to another machine.
_CONVERSATIONS: Final = 0.3
# How often a feature's values are drawn to find out what it needs.
_TRIES: Final = 20
_KINDS: Final = ("at", "hold-link", "slow-link", "cut-link", "kill-engine", "drain-engine", "join-engine")


class FleetSpace(Space, Generic[ConfigT]):
    """The space of the adapter of fleets ``of``.

    ``base`` draws the targets of one machine, without the features and settings ``left_out`` and without features that
    need one of these. ``shared`` turns its configuration into the machines' common one.
    """

    def __init__(
        self,
        of: str,
        base: Callable[[], Space],
        *,
        left_out: Collection[str],
        shared: Callable[[ConfigT], ConfigT] = lambda config: config,
    ) -> None:
        self._of = of
        self._base = base
        self._left_out = left_out
        self._shared = shared

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        own = {name: levels for name, levels in self._base().features.items() if not self._is_left_out(name, levels[0])}
        return {"engines": ("more",), **own, **dict.fromkeys((EVENT + kind for kind in _KINDS), ("on",))}

    def _is_left_out(self, name: str, level: str) -> bool:
        """Whether a feature of one machine is left out, or sets a setting that is left out."""
        if name.startswith(EVENT) or name in self._left_out:
            return True
        rng = random.Random(0)  # noqa: S311 - the same each time
        return not any(self._is_alone(name, level, rng) for _ in range(_TRIES))

    def _is_alone(self, name: str, level: str, rng: random.Random) -> bool:
        try:
            drawn = self._base().draw({name: level}, rng)
        except ScriptDefinitionError:
            return False  # some values of settings exclude each other
        return drawn.adapter.config_words(drawn.config).keys().isdisjoint(self._left_out)

    @property
    def triples(self) -> tuple[str, ...]:
        """Return one machine's triples that are not left out."""
        return tuple(name for name in self._base().triples if name in self.features)

    def allows(self, row: Row) -> bool:
        return self._base().allows(_of_one(row))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Draw a schedule. Raises the errors of one machine's space."""
        base = self._base().draw(_of_one(row), rng)
        if rng.random() < _CONVERSATIONS:
            base = base.with_placed(list(drawn_turns(rng, base)))
        names = tuple(rng.choice(_FLEETS[2:] if "engines" in row else _FLEETS).split(","))
        placed = tuple(self._spread(base, names, rng))
        schedule = Schedule(FleetConfig(self._shared(base.config), names), placed, self._of)
        events = {name: "on" for name in row if name.startswith(EVENT)}
        return schedule.with_placed(list(drawn_events(events, rng, schedule)))

    def workload(self, config: FleetConfig[ConfigT], row: Row, rng: random.Random) -> Schedule:
        """Draw the requests of a row for this fleet."""
        known = {name: level for name, level in row.items() if level in self.features.get(name, ())}
        decoding = next(name for name in config.names if name[0] == "d")
        base = self._base().workload(fleet_adapter(self._of).config_of(config, decoding), _of_one(known), rng)
        return Schedule(config, tuple(self._spread(base, config.names, rng)), self._of)

    def _spread(self, base: Schedule, names: Sequence[str], rng: random.Random) -> Iterator[Placed]:
        """Give each action of one machine to a machine of the fleet, and requests to decoding ones."""
        decoding = [name for name in names if name[0] == "d"]
        adapter = fleet_adapter(self._of)
        for one in base.placed:
            if one.action.is_start:
                yield Placed(one.step, adapter.begin(on=rng.choice(decoding), do=clause_of(one.action)))
            elif isinstance(one.action, AdvanceClock):
                yield one
            elif type(one.action) in adapter.inner_actions:
                yield Placed(one.step, adapter.at(on=rng.choice(names), do=clause_of(one.action)))


def _of_one(row: Row) -> Row:
    return {name: level for name, level in row.items() if name != "engines" and not name.startswith(EVENT)}
