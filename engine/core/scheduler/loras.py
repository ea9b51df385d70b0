"""LoRA adapters: those that requests may select, those that the stages hold, and the next to load or drop.

The stages read a LoRA beside the computation. A change then is a microbatch without tokens, beside other microbatches;
at most one is under way. A LoRA that a request uses is never dropped. A request whose LoRA cannot be loaded ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from engine.core.checkpoint import Checkpoint, CheckpointParts, LoraState
from engine.core.errors import IntegrityError
from engine.core.memory import PLAIN, KvKey
from engine.core.messages import (
    CallAnswer,
    FinishReason,
    Generate,
    LoadLora,
    LoraRead,
    Refusal,
    RefusalKind,
    UnloadLora,
)
from engine.core.plan import LoraChange, LoraOrder, LoraUpdate, SegmentShare
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.ports import StepShare
from engine.core.scheduler.replies import done, refused
from engine.core.scheduler.request import Place, Request

LoraCall = LoadLora | UnloadLora
# The version in the key of a request whose LoRA the stages do not hold: no KV was computed with it.
NOT_RESIDENT: Final = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Lora:
    """A LoRA adapter: its name, the path of its weights, and whether the stages hold them.

    ``version`` is the number of the load that the stages hold; 0 while it is not *resident*. ``used`` is the number of
    the last microbatch with it, or of the first that could have it. A LoRA that is ``leaving`` is about to be unloaded,
    and no further request may select it.
    """

    name: str
    path: str
    version: int = 0
    used: int = -1
    leaving: bool = False

    def use(self, microbatch: int) -> int:
        """Note its use in a microbatch; return its version on the stages."""
        assert self.version, f"{self} is not resident, but microbatch {microbatch} uses it"
        self.used = microbatch
        return self.version


class _State(Enum):
    """The state of a change: its LoRA is being read, all stages have read it, it is in flight."""

    READING = 1
    READY = 2
    LAUNCHED = 3


@dataclass(slots=True, eq=False)
class _Change:
    """The change under way: ``victim`` makes room for ``lora``. Without a call it serves waiting requests."""

    call: LoraCall | None
    lora: Lora
    change: LoraChange
    victim: Lora | None = None
    state: _State = _State.READY


class Loras(Feature):
    """``known`` has the LoRAs that requests may select, by name; at most ``max_loras`` of them are resident.

    ``deadline``, in seconds, is when a waiting unload times out; None without one. Off for an engine without LoRAs.
    """

    control = LoraUpdate

    def __init__(self, core: Core) -> None:
        self.is_on = core.limits.max_loras > 0
        self._core = core
        self._most = core.limits.max_loras
        self._books = core.books
        self._memory = core.memory
        self._counters = core.counters
        self._policy = core.policy
        self.known = {name: Lora(name=name, path=path) for name, path in core.limits.loras}
        # The LoRA of each request that has one, until the request is gone.
        self._of: dict[Request, Lora] = {}
        if core.memory.log is not None:
            core.memory.log.name_of = self._name_of
        # Accepted calls that are not launched yet.
        self._due: list[LoraCall] = []
        self._under_way: _Change | None = None
        # The orders of this step to the stages.
        self._orders: list[LoraOrder] = []
        self._deferred: UnloadLora | None = None
        # The step in which the last change ended, and the step that deferred a change to the next step.
        self._ended_at = self._postponed_at = 0

    def _name_of(self, version: int) -> str:
        """Return the name of the LoRA that the stages hold under this version; '' if they hold none."""
        return next((lora.name for lora in self.known.values() if lora.version == version), "")

    @property
    def resident(self) -> int:
        """The number of LoRAs that the stages hold for requests."""
        return sum([lora.version > 0 for lora in self.known.values()])

    @property
    def is_at_rest(self) -> bool:
        """Return whether no call waits and no change is under way."""
        return not self._due and self._under_way is None and self._deferred is None

    @property
    def has_more(self) -> bool:
        """Return whether a change can be launched, or the change of a call can begin, at once. A profile goes first."""
        under_way = self._under_way
        is_due = bool(self._due) if under_way is None else under_way.state is _State.READY
        return is_due and self._has_slot

    @property
    def _has_slot(self) -> bool:
        books = self._books
        return books.is_awake and books.update is None and len(books.in_flight) < self._core.limits.depth

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {LoadLora: self._on_call, UnloadLora: self._on_call, LoraRead: self._on_read}

    # -- requests --

    def refusal_of(self, message: Generate) -> Refusal | None:
        """Refuse a request for a LoRA that is not known."""
        why = None if message.lora is None else self.why_unknown(message.lora)
        return None if why is None else Refusal(rid=message.rid, kind=RefusalKind.NOT_FOUND, message=why)

    def enter(self, request: Request, message: Generate) -> None:
        """Note the LoRA of a request."""
        if message.lora is not None:
            self._of[request] = self.known[message.lora]
            self._note_key(request)

    def of(self, request: Request) -> Lora | None:
        """Return the LoRA of a request; None for the model itself."""
        return self._of.get(request)

    def holds_back(self, request: Request) -> bool:
        """Return whether the stages lack the LoRA of a request."""
        lora = self._of.get(request)
        return lora is not None and not lora.version

    def fill(self, request: Request, first_page: int, share: SegmentShare) -> None:
        """Add the version of the LoRA that computes a segment."""
        del first_page
        lora = self._of.get(request)
        if lora is not None:
            share["lora"] = lora.use(self._counters.forward_ct)

    def forget(self, request: Request) -> None:
        self._of.pop(request, None)

    def _note_key(self, request: Request) -> None:
        """Separate the KV of one load of a LoRA from the KV of other loads, and from the model's own."""
        request.kv_key = self._key_of(request)

    def _key_of(self, request: Request) -> KvKey:
        lora = self._of.get(request)
        version = PLAIN[0] if lora is None else lora.version or NOT_RESIDENT
        return version, request.kv_key[1]

    def _set_version(self, lora: Lora, version: int) -> None:
        """Set the version of a LoRA that the stages hold now; 0 for none."""
        lora.version = version
        for request, other in self._of.items():
            if other is lora:
                self._note_key(request)

    def why_unknown(self, name: str) -> str | None:
        """Return why no request may select the LoRA of this name; None if requests may."""
        lora = self.known.get(name)
        if lora is None:
            there = ", ".join(map(repr, self.known)) or "none"
            return f"the LoRA must be loaded, got {name!r} with {there} loaded; POST /v1/load_lora_adapter"
        return f"the LoRA {name!r} is being unloaded; load it again" if lora.leaving else None

    # -- calls --

    def _on_call(self, call: LoraCall) -> None:
        self._core.answer_now(self.ask(call, self._core.now))

    def ask(self, call: LoraCall, now: float) -> CallAnswer | None:
        """Refuse a call or defer it; None if its answer comes later."""
        if not self._most:
            return refused(call, "this server holds no LoRAs; start it with --max-loras N or --lora NAME=PATH")
        return self._ask_load(call) if isinstance(call, LoadLora) else self._ask_unload(call, now)

    def on_time(self, now: float) -> None:
        """Refuse a waiting unload that has timed out."""
        self._core.answer_now(self.answer_due(now))

    def answer_due(self, now: float) -> CallAnswer | None:
        """Return the refusal of a waiting unload that has timed out; it becomes due once nothing uses its LoRA."""
        call = self._deferred
        assert call is not None, "a deadline is set, but no unload waits"
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
        coming = [one.change.name for one in (self._under_way,) if one is not None]
        if call.name in (*self.known, *[one.name for one in self._due], *coming):
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

    def launch(self, number: int) -> LoraUpdate | None:
        """Launch the change under way once the stages have read its LoRA; without one, begin the next."""
        if not self._has_slot:
            return None
        if self._under_way is None:
            self._under_way = self._begin()
        under_way = self._under_way
        if under_way is None or under_way.state is not _State.READY:
            return None
        under_way.state = _State.LAUNCHED
        return LoraUpdate(number, under_way.change)

    def _begin(self) -> _Change | None:
        """Begin a change, if one is due: calls in order, then the LoRAs that requests wait for.

        In the step in which a change ends, none begins for requests: the requests that waited for it go first.
        """
        begun: _Change | None = None
        if self._due:
            begun = self._of_call(self._due.pop(0))
        elif self._books.paused is None and any(map(self.holds_back, self._core.startable())):
            if self._ended_at == self._core.step_number:
                self._postponed_at = self._core.step_number
            else:
                begun = self._of_requests()
        if begun is None:
            return None
        if begun.victim is not None:
            # From here on no request starts with it: the stages drop it as soon as they have read the other one.
            self._set_version(begun.victim, 0)
        change = begun.change
        if change.path is not None:
            begun.state = _State.READING
            self._orders.append(LoraOrder(change.version, change.name, change.path))
        return begun

    def report(self, share: StepShare) -> bool:
        """Order the stages to read and to drop. Returns True if this step deferred a change to the next one."""
        if self._orders:
            share["loras"] = tuple(self._orders)
            self._orders.clear()
        return self._postponed_at == self._core.step_number

    def _on_read(self, read: LoraRead) -> None:
        """Note that all stages have read a LoRA, or end its change. After the loss of the pipeline no read is open."""
        under_way = self._under_way
        if under_way is None or under_way.state is not _State.READING or under_way.change.version != read.version:
            return
        if read.error is None:
            under_way.state = _State.READY
            return
        # Other stages may have read their shares.
        self._orders.append(LoraOrder(read.version, under_way.change.name))
        self._end_change(read.error)

    def finish(self, error: str | None) -> None:
        """Note that all stages have made the change, or with ``error`` none has, and answer its call.

        Without a call, requests wait for the LoRA: with ``error`` they end.
        """
        under_way = self._under_way
        assert under_way is not None, "a change of LoRAs came back that was never launched"
        assert under_way.state is _State.LAUNCHED, f"{under_way} came back before it was launched"
        self._end_change(error)

    def _end_change(self, error: str | None) -> None:
        ended, self._under_way, self._ended_at = self._under_way, None, self._core.step_number
        assert ended is not None, "a change of LoRAs ends that never began"
        if error is None:
            self._note_changed(ended)
        else:
            self._note_failed(ended, error)

    def _note_changed(self, ended: _Change) -> None:
        lora, change = ended.lora, ended.change
        if change.path is None:
            del self.known[lora.name]
            what = "removed"
        else:
            self.known[lora.name] = lora
            self._set_version(lora, 0 if change.drop == change.version else change.version)
            lora.used = self._counters.forward_ct
            self._counters.lora_loads += 1
            self._counters.lora_evictions += ended.victim is not None
            what = "added"
        if ended.call is not None:
            self._core.say(done(ended.call, f"Success: LoRA adapter {change.name!r} {what} successfully."))

    def _note_failed(self, ended: _Change, error: str) -> None:
        call, lora, change = ended.call, ended.lora, ended.change
        if change.path is None:
            lora.leaving = False
        if ended.victim is not None:
            self._set_version(ended.victim, change.drop)
        if call is not None:
            self._core.say(refused(call, error, fault=None if change.path is None else "path"))
            return
        # Only waiting requests: a running one would have kept the LoRA.
        for request in [one for one in self._books.waiting if self._of.get(one) is lora]:
            self._core.end(request, FinishReason.UNAVAILABLE, error=error)

    def give_up(self, why: str) -> None:
        under_way = None if self._under_way is None else self._under_way.call
        calls = [call for call in (under_way, *self._due, self._deferred) if call is not None]
        self._due.clear()
        self._orders.clear()
        self._under_way = self._deferred = self.deadline = None
        for call in calls:
            self._core.say(refused(call, why))

    def _of_call(self, call: LoraCall) -> _Change:
        if isinstance(call, UnloadLora):
            lora = self.known[call.name]
            return _Change(call, lora, LoraChange(lora.name, drop=lora.version))
        lora = Lora(name=call.name, path=call.path)
        wanted = {self._of[request] for request in self._core.startable() if request in self._of}
        has_place, victim = self._place_for(wanted)
        return self._load(call, lora, victim, is_kept=has_place)

    def _of_requests(self) -> _Change | None:
        """Load the LoRA of the first request that lacks its LoRA, if there is room for it.

        A LoRA that an earlier request waits for is not a victim: the two would evict each other forever.
        """
        wanted: set[Lora] = set()
        for request in self._policy.order(self._core.startable(), self._memory):
            lora = self._of.get(request)
            if lora is None:
                continue
            if not lora.version:
                has_place, victim = self._place_for(wanted)
                return self._load(None, lora, victim, is_kept=True) if has_place else None
            wanted.add(lora)
        return None

    def _load(self, call: LoadLora | None, lora: Lora, victim: Lora | None, *, is_kept: bool) -> _Change:
        version = self._counters.lora_loads + 1
        drop = 0 if victim is None else victim.version
        if not is_kept:
            drop = version
        return _Change(call, lora, LoraChange(lora.name, version, lora.path, drop), victim)

    def _place_for(self, wanted: Collection[Lora]) -> tuple[bool, Lora | None]:
        """Return whether one more LoRA can be resident, and the LoRA that must make room for it, if any."""
        if self.resident < self._most:
            return True, None
        in_use = {self._of.get(request) for request in self._books.live() if request.lease is not None}
        idle = [one for one in self.known.values() if one.version and one not in in_use and one not in wanted]
        victim = min(idle, key=lambda one: (one.used, one.version), default=None)
        return victim is not None, victim

    # -- users --

    def _users_of(self, lora: Lora) -> list[Request]:
        return [request for request in self._books.live() if self._of.get(request) is lora]

    def _counts(self, users: Sequence[Request]) -> str:
        """Describe the places of these requests, and the microbatches in flight with them, as counts."""
        places = [request.place for request in users]
        flying = sum([not set(flight.requests).isdisjoint(users) for flight in self._books.in_flight])
        leaving = places.count(Place.RETRACTING) + places.count(Place.RELEASING)
        return (
            f"waiting={places.count(Place.WAITING)} chunked={places.count(Place.CHUNKED)} "
            f"running={places.count(Place.RUNNING)} in_flight={flying} releasing={leaving}"
        )

    # -- statistics, audit, checkpoint --

    def stats(self) -> dict[str, int]:
        return {"loras_resident": self.resident}

    def check(self, live: Sequence[Request]) -> None:
        """Check that requests with memory have resident LoRAs, and that at most ``max_loras`` are resident."""
        for request in live:
            lora = self._of.get(request)
            if request.lease is not None and request.lease.kv_key != self._key_of(request):
                raise IntegrityError(
                    f"{request} is computed with version {request.lease.kv_key[0]} of {lora}, which the stages no "
                    f"longer hold, or for the salt {request.lease.kv_key[1]}, which is not its own"
                )
            if lora is not None and self.known.get(lora.name) is not lora:
                raise IntegrityError(f"{request} is computed with {lora}, which was unloaded")
        if (self.deadline is None) is not (self._deferred is None):
            raise IntegrityError(f"the unload {self._deferred} waits until {self.deadline}")
        if self._of and (strange := self._of.keys() - set(live)):
            raise IntegrityError(f"{list(strange)} are gone, but still have a LoRA")
        if self.resident > self._most:
            raise IntegrityError(f"{self.resident} LoRAs are resident, max_loras={self._most}")

    def snapshot(self, parts: CheckpointParts) -> None:
        known = self.known.values()
        parts["loras"] = tuple([LoraState(one.name, one.path, one.version, one.used) for one in known])

    def restore(self, checkpoint: Checkpoint) -> None:
        self.known = {one.name: Lora(name=one.name, path=one.path, used=one.used) for one in checkpoint.loras}
        for one in checkpoint.loras:
            self._set_version(self.known[one.name], one.version)
