"""LoRA adapters: which there are, which of them the stages hold, and what is loaded and dropped next.

A change is a microbatch without tokens, one at a time, launched beside others. What a request uses is never dropped. It
plans and ends no request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from engine.core.limits import Limits
from engine.core.memory import KVMemory
from engine.core.messages import CacheEvent, CallAnswer, LoadLora, PagesStored, UnloadLora
from engine.core.plan import LoraChange, LoraUpdate
from engine.core.scheduler.books import Books
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.policy import policy_named
from engine.core.scheduler.replies import done, refused
from engine.core.scheduler.request import Lora, Place, Request

LoraCall = LoadLora | UnloadLora


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """The change that is in flight: ``victim`` makes room for ``lora``; without a call it is for requests."""

    call: LoraCall | None
    lora: Lora
    change: LoraChange
    victim: Lora | None = None


class Loras:
    """``known`` are those that requests may ask for, by name; at most ``max_loras`` of them are resident.

    ``deadline``, in seconds, is when the unload that waits gives up; None when none waits. With ``is_postponed`` the
    last step left a change to the next one.
    """

    def __init__(self, limits: Limits, books: Books, memory: KVMemory, counters: Counters, grammars: Grammars) -> None:
        self._most = limits.max_loras
        self._books = books
        self._memory = memory
        self._counters = counters
        self._grammars = grammars
        self._policy = policy_named(limits.schedule_policy)
        self.known = {name: Lora(name=name, path=path) for name, path in limits.loras}
        # Calls that were accepted and are not launched yet.
        self._due: list[LoraCall] = []
        self._launched: _Launched | None = None
        self._deferred: UnloadLora | None = None
        self.deadline: float | None = None
        self._has_landed = False
        self.is_postponed = False

    @property
    def resident(self) -> int:
        """How many LoRAs the stages hold for requests."""
        return sum([lora.version > 0 for lora in self.known.values()])

    @property
    def is_at_rest(self) -> bool:
        """No call waits and nothing is in flight."""
        return not self._due and self._launched is None and self._deferred is None

    @property
    def is_call_due(self) -> bool:
        """A call's change can be launched, as soon as there is a place for it."""
        return bool(self._due) and self._launched is None

    def named(self, events: Sequence[CacheEvent]) -> tuple[CacheEvent, ...]:
        """What entered the cache, with the name of the LoRA that computed it: each is still resident in its step."""
        names = {lora.version: lora.name for lora in self.known.values() if lora.version}
        return tuple(
            [
                msgspec.structs.replace(event, lora_name=names[event.kv_key[0]])
                if isinstance(event, PagesStored) and event.kv_key[0]
                else event
                for event in events
            ]
        )

    def why_unknown(self, name: str) -> str | None:
        """Why no request may ask for the LoRA of this name; None when one may."""
        lora = self.known.get(name)
        if lora is None:
            there = ", ".join(map(repr, self.known)) or "none"
            return f"the LoRA must be loaded, got {name!r}, and loaded are {there}; POST /v1/load_lora_adapter"
        return f"the LoRA {name!r} is being unloaded; load it again" if lora.leaving else None

    # -- calls --

    def ask(self, call: LoraCall, now: float) -> CallAnswer | None:
        """Refuse a call, or defer it; None when its answer comes later."""
        if not self._most:
            return refused(call, "this server holds no LoRAs; start it with --max-loras N or --lora NAME=PATH")
        return self._ask_load(call) if isinstance(call, LoadLora) else self._ask_unload(call, now)

    def answer_due(self, now: float) -> CallAnswer | None:
        """The refusal of the unload that waits, if its time is up; it is due for launch once nothing uses it."""
        call = self._deferred
        if call is None:
            return None
        assert self.deadline is not None, f"{call} waits without a deadline"
        users = self._users_of(self.known[call.name])
        if users and now < self.deadline:
            return None
        self._deferred = self.deadline = None
        if not users:
            self._due.append(call)
            return None
        self.known[call.name].leaving = False
        return refused(call, f"{call.name!r} is still in use after {call.timeout_s} s: {self._counts(users)}")

    def _ask_load(self, call: LoadLora) -> CallAnswer | None:
        coming = [one.call for one in (self._launched,) if one is not None]
        if call.name in self.known or any(one is not None and one.name == call.name for one in (*self._due, *coming)):
            return refused(call, f"the LoRA {call.name!r} has already been loaded; unload it first", fault="name")
        self._due.append(call)
        return None

    def _ask_unload(self, call: UnloadLora, now: float) -> CallAnswer | None:
        lora = self.known.get(call.name)
        if lora is None:
            return refused(call, f"the LoRA {call.name!r} cannot be found", not_found=True, fault="name")
        if lora.leaving:
            return refused(call, f"the LoRA {call.name!r} is being unloaded by another call")
        users = self._users_of(lora)
        if users and call.timeout_s is None:
            return refused(call, f"{call.name!r} is in use: {self._counts(users)}")
        if users and self._deferred is not None:
            return refused(call, f"{call.name!r} is in use, and another unload waits: {self._counts(users)}")
        lora.leaving = True
        if users:
            assert call.timeout_s is not None
            self._deferred, self.deadline = call, now + call.timeout_s
        else:
            self._due.append(call)
        return None

    # -- changes --

    def next_change(self, *, has_slot: bool) -> LoraChange | None:
        """What the stages are to load or drop next, if something is due: calls in order, then what requests wait for.

        In the step in which a change comes back none is launched for requests: those that waited for it go first.
        """
        has_landed, self._has_landed, self.is_postponed = self._has_landed, False, False
        if self._launched is not None or not has_slot:
            return None
        if self._due:
            self._launched = self._of_call(self._due.pop(0))
        elif self._books.paused is None and any(request.lacks_lora for request in self._startable):
            self.is_postponed = has_landed
            self._launched = None if has_landed else self._of_requests()
        if self._launched is None:
            return None
        victim = self._launched.victim
        if victim is not None:
            victim.version = 0
        return self._launched.change

    def finish(self, error: str | None) -> CallAnswer | None:
        """All stages have changed, or with ``error`` none has; the answer to the call that asked for it, if one did."""
        launched, self._launched, self._has_landed = self._launched, None, True
        assert launched is not None, "a change of LoRAs came back that was never launched"
        call, lora, change = launched.call, launched.lora, launched.change
        if error is not None:
            if change.path is None:
                lora.leaving = False
            if launched.victim is not None:
                launched.victim.version = change.drop
            return None if call is None else refused(call, error, fault=None if change.path is None else "path")
        if change.path is None:
            del self.known[lora.name]
            return _answer(change, "removed", call)
        self.known[lora.name] = lora
        lora.version = 0 if change.drop == change.version else change.version
        lora.used = self._counters.forward_ct
        self._counters.lora_loads += 1
        self._counters.lora_evictions += launched.victim is not None
        return _answer(change, "added", call)

    def left_without(self, control: LoraUpdate) -> list[Request]:
        """The requests for which a LoRA was to be loaded, and could not."""
        lora = self.known[control.change.name]
        return [request for request in self._books.waiting if request.lora is lora]

    def give_up(self, why: str) -> list[CallAnswer]:
        """Give up every call: nothing can be launched any more, and nothing will come back."""
        launched = None if self._launched is None else self._launched.call
        calls = [call for call in (launched, *self._due, self._deferred) if call is not None]
        self._due.clear()
        self._launched = self._deferred = self.deadline = None
        return [refused(call, why) for call in calls]

    def _of_call(self, call: LoraCall) -> _Launched:
        if isinstance(call, UnloadLora):
            lora = self.known[call.name]
            return _Launched(call, lora, LoraChange(lora.name, drop=lora.version))
        lora = Lora(name=call.name, path=call.path)
        wanted = {request.lora for request in self._startable if request.lora is not None}
        has_place, victim = self._place_for(wanted)
        return self._load(call, lora, victim, is_kept=has_place)

    def _of_requests(self) -> _Launched | None:
        """Load the LoRA of the first request that lacks one, if there is a place for it.

        One that a request before it waits for makes no room: the two would be loaded in turn for ever.
        """
        wanted: set[Lora] = set()
        for request in self._policy.order(self._startable, self._memory):
            if request.lora is None:
                continue
            if not request.lora.version:
                has_place, victim = self._place_for(wanted)
                return self._load(None, request.lora, victim, is_kept=True) if has_place else None
            wanted.add(request.lora)
        return None

    def _load(self, call: LoadLora | None, lora: Lora, victim: Lora | None, *, is_kept: bool) -> _Launched:
        version = self._counters.lora_loads + 1
        drop = version if not is_kept else 0 if victim is None else victim.version
        return _Launched(call, lora, LoraChange(lora.name, version, lora.path, drop), victim)

    def _place_for(self, wanted: Collection[Lora]) -> tuple[bool, Lora | None]:
        """Whether one more LoRA can be resident, and which other one must make room for it."""
        if self.resident < self._most:
            return True, None
        in_use = {request.lora for request in self._books.live() if request.lease is not None}
        idle = [one for one in self.known.values() if one.version and one not in in_use and one not in wanted]
        victim = min(idle, key=lambda one: (one.used, one.version), default=None)
        return victim is not None, victim

    @property
    def _startable(self) -> Sequence[Request]:
        """Those that may ask for their LoRAs: one whose grammar is still being compiled does not."""
        return self._grammars.startable(self._books.waiting)

    # -- who uses one --

    def _users_of(self, lora: Lora) -> list[Request]:
        return [request for request in self._books.live() if request.lora is lora]

    def _counts(self, users: Sequence[Request]) -> str:
        """How many of these are where, and in how many microbatches in flight they are."""
        places = [request.place for request in users]
        flying = sum([not set(flight.requests).isdisjoint(users) for flight in self._books.in_flight])
        leaving = places.count(Place.RETRACTING) + places.count(Place.RELEASING)
        return (
            f"waiting={places.count(Place.WAITING)} chunked={places.count(Place.CHUNKED)} "
            f"running={places.count(Place.RUNNING)} in_flight={flying} releasing={leaving}"
        )


def _answer(change: LoraChange, what: str, call: LoraCall | None) -> CallAnswer | None:
    return None if call is None else done(call, f"Success: LoRA adapter {change.name!r} {what} successfully.")
