"""Adapters of engines with a role: they have their own targets, and share everything else with engines without one.

The other end of transfers is an imaginary engine, which may do whatever a real one may: send all pages at once, some or
none, or fail.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.core.config import EngineConfig
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.script.loader import find_test
from scripted.search.covering import Row
from scripted.search.generated import EVENT, Space, drawn_events
from scripted_lockstep.actions import HoldTransfers, StartRequest
from scripted_lockstep.adapter import LockstepAdapter
from scripted_lockstep.mutants import MUTANTS, mutant_named
from scripted_lockstep.space.targets import SPACE

_TRANSFERS: Final = tuple(EVENT + tag for tag in ("hold-transfers", "fail-transfer"))
# Features that an engine of the role refuses, and features that mean nothing for a prompt without output.
_WITHOUT: Final = {
    "decode": {"window", "host"},
    "prefill": {
        "window",
        "drafts",
        "loras",
        "sampling",
        "penalties",
        "bias",
        "scores",
        "no-output",
        "grammars",
        "stops",
    }
    | {"kept-grammars", "held-grammars", "event-hold-grammars", "event-fail-grammar"}
    | {"event-load-lora", "event-unload-lora", "event-hold-loras"},
}
_WITHOUT_LEVELS: Final = {("drafts", "of-a-model"), ("stages", "async")}
_FIRST_PAGES: Final = (0, 0, 0, 1, 2)
# Shorter limits would expire in the time that is drawn for others.
_TIMEOUTS_S: Final = (0.5, 1.0, 30.0)
_LATE_SHARE: Final = 0.7


class RoleSpace(Space):
    """The space of every engine, without the role's exclusions."""

    def __init__(self, role: str) -> None:
        self._role = role

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        without, kept = _WITHOUT[self._role], dict[str, tuple[str, ...]]()
        for name, levels in SPACE.features.items():
            left = [level for level in levels if (name, level) not in _WITHOUT_LEVELS or self._allows_level(level)]
            if name not in without and left:
                kept[name] = tuple(left)
        return kept | dict.fromkeys(_TRANSFERS, ("on",))

    def _allows_level(self, level: str) -> bool:
        return level == "async" and self._role == "decode"

    @property
    def triples(self) -> tuple[str, ...]:
        """The features that the role leaves."""
        return tuple(name for name in SPACE.triples if name in self.features)

    def allows(self, row: Row) -> bool:
        return SPACE.allows(_without_transfers(row))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Raises what ``EngineSpace.draw`` raises."""
        base = SPACE.draw(_without_transfers(row), rng)
        placed = self._placed(base, rng)
        timeout_s = rng.choice(_TIMEOUTS_S)
        config = base.config.model_copy(update={"role": self._role, "prefill_timeout_s": timeout_s})
        schedule = Schedule(config, placed, f"lockstep-{self._role}")
        events = list(drawn_events({name: "on" for name in _TRANSFERS if name in row}, rng, schedule))
        return schedule.with_placed([*events, *_time_that_passes(events, timeout_s, rng)])

    def workload(self, config: EngineConfig, row: Row, rng: random.Random) -> Schedule:
        """Draw the requests of a row for this configuration, without the features that the role excludes."""
        of_role = {name: level for name, level in row.items() if level in self.features.get(name, ())}
        base = SPACE.workload(config, _without_transfers(of_role), rng)
        return Schedule(config, self._placed(base, rng), f"lockstep-{self._role}")

    def _placed(self, base: Schedule, rng: random.Random) -> tuple[Placed, ...]:
        return tuple([Placed(one.step, self._of_role(one.action, rng)) for one in base.placed])

    def _of_role(self, action: Any, rng: random.Random) -> Any:
        if self._role == "prefill" and isinstance(action, StartRequest):
            # A decode engine orders a prompt only once.
            return msgspec.structs.replace(action, first_page=rng.choice(_FIRST_PAGES), n=1)
        return action


def _time_that_passes(events: Sequence[Placed], timeout_s: float, rng: random.Random) -> Iterator[Placed]:
    """Advance the clock while transfers are held, to their deadline or halfway."""
    for one in events:
        if isinstance(one.action, HoldTransfers) and rng.random() < _LATE_SHARE:
            yield Placed(one.step + rng.randint(1, 6), AdvanceClock(seconds=timeout_s * rng.choice((0.5, 1.0))))


def _without_transfers(row: Row) -> Row:
    return {name: level for name, level in row.items() if name not in _TRANSFERS}


_SMALL: Final = "page_size=4 chunked_prefill_size=16 max_total_tokens=128"
_DEEP: Final = f"pp_size=4 {_SMALL}"
_LONG: Final = "chunked_prefill_size=512 max_total_tokens=4096"
_TIGHT: Final = "page_size=4 chunked_prefill_size=16 max_total_tokens=64"
_WORKLOADS: Final = {
    "decode": {
        "one": f"role=decode {_SMALL}; 1 start a prompt=30",
        "two-alike": f"role=decode {_SMALL}; 1 start a prompt=30; 2 start b prompt=30 new=4",
        "again": f"role=decode {_SMALL}; 1 start a prompt=22; 12 start b prompt=30",
        "held": f"role=decode {_SMALL}; 1 hold-transfers; 1 start a prompt=30; 2 start b prompt=22 seed=1",
        "parts": f"role=decode {_SMALL}; 1 hold-transfers; 1 start a prompt=30; 3 fail-transfer pages=3",
        "deep": f"role=decode {_DEEP}; 1 start a prompt=30; 1 start b prompt=41 seed=1 new=5",
        "tight": f"role=decode {_TIGHT}; 1 start a prompt=30 new=6; 1 start b prompt=22 seed=1 new=6",
        "full": f"role=decode {_TIGHT}; 1 start a prompt=30; 1 start b prompt=33 seed=1",
        "late": f"role=decode {_SMALL}; 1 hold-transfers; 1 start a prompt=30; 3 advance seconds=30.0",
        "long-alike": f"role=decode {_LONG}; 1 hold-transfers; 1 start a prompt=600; 2 start b prompt=600 new=3; "
        "5 release-transfers",
        "long-alike-scored": f"role=decode {_LONG}; 1 hold-transfers; 1 start a prompt=600; 2 start b prompt=600 new=3 "
        "logprobs_from=590; 9 release-transfers",
        "late-again": f"role=decode {_SMALL}; 1 start a prompt=6; 4 hold-transfers; 4 start b prompt=30; "
        "6 advance seconds=30.0",
    },
    "prefill": {
        "one": f"role=prefill {_SMALL}; 1 start a prompt=40 first_page=0",
        "rest": f"role=prefill {_SMALL}; 1 start a prompt=40 first_page=3; 9 start b prompt=48 first_page=0",
        "held": f"role=prefill {_SMALL}; 1 hold-transfers; 1 start a prompt=40 first_page=0",
        "alike": f"role=prefill {_SMALL}; 1 hold-transfers; 1 start a prompt=24 first_page=0; 4 hold; "
        "4 start b prompt=40 first_page=0; 6 release-transfers; 8 release",
        "deep": f"role=prefill {_DEEP}; 1 start a prompt=40 first_page=0; 1 start b prompt=24 seed=1 first_page=1",
        "tight": f"role=prefill {_TIGHT}; 1 start a prompt=40 first_page=0; 1 start b prompt=40 seed=1 first_page=0",
    },
}


class RoleAdapter(LockstepAdapter):
    """The engine's scheduler in a role."""

    def __init__(self, role: str) -> None:
        self.name = f"lockstep-{role}"
        self._role = role
        self.space = RoleSpace(role)
        self.workloads = _WORKLOADS[role]

    def read_config(self, words: Mapping[str, str]) -> EngineConfig:
        """Read a configuration, by default of this role. Raises ConfigError."""
        return super().read_config({"role": self._role, **words})

    @property
    def mutant_names(self) -> tuple[str, ...]:
        """Return the mutants of both roles; each is searched for in its own role's targets."""
        return tuple(mutant.name for mutant in MUTANTS if mutant.adapter)

    def about(self, mutant: str) -> Mapping[str, str]:
        """Describe a mutant: its origin, the script that fails with it, and that script's tiers."""
        one = mutant_named(mutant)
        tiers = " and ".join(find_test(one.test).tiers)
        return {"origin": one.origin, "script": f"`{one.test.rpartition('::')[2]}`", "tiers": tiers}

    @property
    def contract_names(self) -> tuple[str, ...]:
        """Return none: contracts are searched for in engines without a role."""
        return ()


PREFILL: Final = RoleAdapter("prefill")
DECODE: Final = RoleAdapter("decode")
