"""What the search draws of fleets."""

from __future__ import annotations

import functools
import random
from typing import Final

from scripted.adapters.lockstep.actions import StartRequest
from scripted.adapters.lockstep.fleets.actions import INNER, NAME, At, Begin, clause_of
from scripted.adapters.lockstep.fleets.config import FleetConfig
from scripted.adapters.lockstep.roles import DECODE
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.generated import EVENT, Row, drawn_events

_FLEETS: Final = ("p0,d0", "p0,d0", "p0,p1,d0", "p0,d0,d1", "p0,p1,d0,d1")


class FleetSpace:
    """Implements ``scripted.search.generated.Space``: a decode engine's targets, spread over a fleet."""

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        features = DECODE.space.features.items()
        own = {name: levels for name, levels in features if not name.startswith(EVENT) and name not in _LEFT_OUT}
        events = dict.fromkeys((EVENT + kind for kind in ("at", *_LINK_KINDS)), ("on",))
        return {"engines": ("more",), **own, **events}

    @property
    def triples(self) -> tuple[str, ...]:
        """Those of one engine that are left."""
        return tuple(name for name in DECODE.space.triples if name in self.features)

    def allows(self, row: Row) -> bool:
        return DECODE.space.allows(_of_one(row))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Raises what the space of one engine raises."""
        base = DECODE.space.draw(_of_one(row), rng)
        names = tuple(rng.choice(_FLEETS[2:] if "engines" in row else _FLEETS).split(","))
        decoding = [name for name in names if name[0] == "d"]
        placed = []
        for one in base.placed:
            if isinstance(one.action, StartRequest):
                placed.append(Placed(one.step, Begin(on=rng.choice(decoding), do=clause_of(one.action))))
            elif isinstance(one.action, AdvanceClock):
                placed.append(one)
            elif type(one.action) in INNER:
                placed.append(Placed(one.step, At(on=rng.choice(names), do=clause_of(one.action))))
        config = FleetConfig(base.config.model_copy(update={"role": "both"}), names)
        schedule = Schedule(config, tuple(placed), NAME)
        events = {name: "on" for name in row if name.startswith(EVENT)}
        return schedule.with_placed(list(drawn_events(events, rng, schedule)))


_LINK_KINDS: Final = ("hold-link", "slow-link", "cut-link", "kill-engine")
_LEFT_OUT: Final = {"loras", "kept-grammars", "held-grammars", "profile", "scale"}


def _of_one(row: Row) -> Row:
    return {name: level for name, level in row.items() if name != "engines" and not name.startswith(EVENT)}
