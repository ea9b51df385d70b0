"""The world outside a flight's scheduler as a schedule expresses it: loads, saves, grammars, numbers of LoRAs.

The replay reports the recorded answers as it gives them; ``outside`` returns them as signals and settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from scripted.core.phrases import plural
from scripted.sdk import Signal
from scripted.sdk.flight.frames import Arrived, Offered, Result
from scripted.sdk.flight.replay import Outside, name_of
from scripted_vllm.actions import FAIL, HOLD, HOLD_GRAMMARS, OFFER, RELEASE, RELEASE_GRAMMARS, UNKNOWN

# The LoRAs that a schedule of this adapter can name.
LORAS: Final = 3


class OutsideOfFlight:
    """Collects what happened outside, by plan."""

    def __init__(self) -> None:
        self._signals: list[tuple[int, Signal]] = []
        self._requests: dict[str, dict[str, Any]] = {}
        # Each request's last total of offered tokens, and how many answers were of which kind.
        self._totals: dict[str, int] = {}
        self._kinds: Counter[bool] = Counter()
        # The first token of each load under way.
        self._loads: dict[str, int] = {}
        self._loras: dict[int, int] = {}
        # Requests whose grammar is not compiled, and how many grammars were done before others that began with them.
        self._compiling: set[str] = set()
        self._early = 0
        self._kept: set[str] = set()
        self._ended: set[str] = set()
        self._aborted: set[str] = set()
        self._torn = 0

    # -- the replay reports --

    def arrive(self, event: Arrived) -> None:
        """Note a request in the terms of a schedule, in which the highest priority goes first."""
        changed: dict[str, Any] = {"priority": -event.priority} if event.priority else {}
        if event.lora:
            changed["lora"] = (self._loras.setdefault(event.lora, len(self._loras) + 1) - 1) % LORAS + 1
        if event.grammar:
            changed["grammar"] = 1
            self._compiling.add(name_of(event))
        self._requests[name_of(event)] = changed

    def compile(self, name: str, plan: int, *, compiles: bool) -> None:
        """Note that a grammar is compiled when this plan is made: a schedule lets it go in the step before."""
        self._compiling.discard(name)
        self._early += bool(self._compiling)
        self._requests[name]["grammar"] = 1 if compiles else -1
        self._signals += [(plan - 1, Signal(name=RELEASE_GRAMMARS)), (plan, Signal(name=HOLD_GRAMMARS))]

    def offer(self, name: str, plan: int, computed: int, answer: Offered) -> None:
        """Note an answer; ``computed`` tokens are in this engine's own cache."""
        total = UNKNOWN if answer.tokens is None else 0
        if answer.tokens:
            total = computed + answer.tokens
            self._kinds[answer.is_async] += 1
        if self._totals.get(name) != total:
            self._totals[name] = total
            self._signals.append((plan, Signal(name=OFFER, value=total, rid=name)))

    def load(self, name: str, computed: int) -> None:
        self._loads[name] = computed

    def land(self, result: Result, names: Mapping[int, str], tables: Mapping[str, Sequence[int]], block: int) -> None:
        """Note the transfers that a result reports. ``tables`` are the requests' blocks, each of ``block`` tokens."""
        lost = set(result.lost)
        for name, begun in self._loads.items():
            table = list(tables.get(name, ()))[begun // block :]
            missing = [place for place, one in enumerate(table, begun // block) if one in lost]
            if missing:
                self._signals.append((result.plan, Signal(name=FAIL, value=missing[0], rid=name)))
                self._torn += missing[-1] - missing[0] + 1 != len(missing)
        for one in result.failed:
            self._signals.append((result.plan, Signal(name=FAIL, rid=names[one])))
        for one in dict.fromkeys((*result.received, *result.failed, *result.sent)):
            self._signals.append((result.plan, Signal(name=RELEASE, rid=names[one])))
            self._loads.pop(names[one], None)

    def keep(self, name: str) -> None:
        self._kept.add(name)

    def end(self, name: str, *, is_abort: bool) -> None:
        (self._aborted if is_abort else self._ended).add(name)

    # -- a schedule asks --

    def outside(self, *, has_connector: bool) -> Outside:
        settings: dict[str, object] = {}
        signals = self._signals
        if any(changed.get("grammar") for changed in self._requests.values()):
            settings |= {"structured_output": True, "grammar_steps": 1}
            signals = [(1, Signal(name=HOLD_GRAMMARS)), *signals]
        if has_connector:
            settings |= self._of_connector()
            usual = settings["kv_offered_tokens"]
            # The most frequent number is offered without an action.
            offers = [(place, signal) for place, (_, signal) in enumerate(signals) if signal.name == OFFER]
            first = {signal.rid: (place, signal.value) for place, signal in reversed(offers)}
            unsaid = {place for place, tokens in first.values() if tokens == usual}
            signals = [one for place, one in enumerate(signals) if place not in unsaid]
            signals = [(1, Signal(name=HOLD)), *signals] if self._kinds[True] or self._kept else signals
        return Outside(tuple(signals), settings, self._requests, tuple(self._notes()))

    def _of_connector(self) -> dict[str, object]:
        asked = [signal.value for _, signal in self._signals if signal.name == OFFER and signal.value > 0]
        saved = self._kept & self._aborted
        return {
            "kv_connector": "sync" if self._kinds[False] > self._kinds[True] else "async",
            "kv_offered_tokens": Counter(asked).most_common(1)[0][0] if asked else 0,
            "kv_transfer_steps": 0,
            "kv_saves": bool(self._kept),
            "kv_saves_aborted": bool(saved),
        }

    def _notes(self) -> Iterator[str]:
        rarer = min(self._kinds[True], self._kinds[False])
        if rarer:
            kind = "synchronous" if self._kinds[True] >= self._kinds[False] else "asynchronous"
            yield f"{plural(rarer, 'answer')} of the KV connector began {kind} loads; here all are of the other kind"
        if self._torn:
            yield f"{plural(self._torn, 'load')} brought later blocks than the first that was lost; here none of them"
        left = len(self._ended - self._kept) if self._kept else 0
        if left:
            yield f"the KV connector did not keep the blocks of {plural(left, 'ended request')}; here it keeps all"
        if len(self._loras) > LORAS:
            yield f"{len(self._loras)} LoRAs were in use; here they share {LORAS} numbers"
        if self._early:
            yield f"{plural(self._early, 'grammar')} compiled beside others that took longer; here they end together"
