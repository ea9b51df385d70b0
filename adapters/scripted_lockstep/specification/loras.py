"""LoRAs of the executable specification: known LoRAs, the resident ones, and the next change.

Names in bold are the rules of docs/rules.md. This module knows only the requests passed to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.core.limits import Limits
from engine.core.messages import LoadLora, LoraRead, UnloadLora
from engine.core.plan import LoraChange, LoraOrder
from scripted_lockstep.specification.calls import Answer
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.queue import by_policy
from scripted_lockstep.specification.request import SpecifiedLora as Lora
from scripted_lockstep.specification.request import SpecifiedRequest as Request

_Call = LoadLora | UnloadLora


@dataclass(frozen=True, eq=False)
class SpecifiedChange:
    """A change of the resident LoRAs: the call that asked for it, if any, the LoRA, and the LoRA that it replaces."""

    call: _Call | None
    lora: Lora
    says: LoraChange
    victim: Lora | None


class SpecifiedLoras:
    """Tracks LoRAs. ``due`` are accepted calls, ``flight`` is the current change, ``unload`` waits until ``deadline``.

    The current change is first ``being_read``, then ``has_been_read``, then in flight. ``orders`` are this step's
    orders to the stages.
    """

    def __init__(self, limits: Limits, totals: dict[str, int]) -> None:
        self._limits, self._totals = limits, totals
        self.known = {name: Lora(name, path) for name, path in limits.loras}
        self.due: list[_Call] = []
        self.flight: SpecifiedChange | None = None
        self.unload: UnloadLora | None = None
        self.deadline: float | None = None
        self.has_landed = self.is_postponed = self.being_read = self.has_been_read = False
        self.orders: list[LoraOrder] = []

    @property
    def resident(self) -> list[Lora]:
        """The LoRAs that the stages hold."""
        return [one for one in self.known.values() if one.version]

    @property
    def to_ask_for(self) -> list[str]:
        """**Refuse**: a LoRA that is not loaded or is being unloaded."""
        return [name for name, one in self.known.items() if not one.is_leaving]

    # -- calls --

    def ask(self, call: _Call, everyone: Sequence[Request], now: float) -> Iterator[Answer]:
        """**LoRAs**, **Unload**: accept, refuse or defer a call. ``everyone``: all requests that live or own memory."""
        lora = self.known.get(call.name)
        users = _users_of(lora, everyone)
        waiting = f"waiting={sum([not one.owns_memory for one in users])} "
        if not self._limits.max_loras:
            yield call, False, "no LoRAs"
        elif isinstance(call, LoadLora):
            coming = [
                *self.known,
                *[one.name for one in self.due],
                *[self.flight.says.name for _ in "1" if self.flight],
            ]
            if call.name in coming:
                yield call, False, "already been loaded", ("fault", "name")
            else:
                self.due.append(call)
        elif lora is None:
            yield call, False, "cannot be found", ("fault", "name"), ("not_found", True)
        elif lora.is_leaving or (users and (call.timeout_s is None or self.unload is not None)):
            yield call, False, "being unloaded" if lora.is_leaving else waiting
        else:
            lora.is_leaving = True
            if users:
                self.unload, self.deadline = call, now + (call.timeout_s or 0.0)
            else:
                self.due.append(call)

    def check_unload(self, everyone: Sequence[Request], now: float) -> Iterator[Answer]:
        """**Unload**: the deferred call is due once no request uses the LoRA, and refused after its deadline."""
        if self.unload is None:
            return
        call, lora = self.unload, self.known[self.unload.name]
        users = _users_of(lora, everyone)
        if users and now < (self.deadline or 0.0):
            return
        self.unload = self.deadline = None
        if users:
            lora.is_leaving = False
            yield call, False, "still in use"
        else:
            self.due.append(call)

    def fail_all(self, why: str) -> Iterator[Answer]:
        """**Death**: every pending call fails, because no LoRA changes any more."""
        flying = None if self.flight is None else self.flight.call
        calls = [call for call in (flying, *self.due, self.unload) if call is not None]
        self.due, self.orders, self.flight, self.unload, self.deadline = [], [], None, None, None
        self.being_read = self.has_been_read = False
        for call in calls:
            yield call, False, why

    # -- **Changes** --

    @property
    def is_call_due(self) -> bool:
        """**Again**: a change that has been read, or that a call asks for, is launched as soon as there is a slot."""
        return self.has_been_read or (self.flight is None and bool(self.due))

    def change(self, waiting: Sequence[Request], memory: SpecifiedMemory, *, has_slot: bool, goes_on: bool) -> bool:
        """Launch the change that was read, or begin one: calls in order, then the first request that lacks its LoRA.

        Returns whether one is launched. In the step that ends a change, the requests that waited for it go first.
        ``goes_on`` is False while generation is paused.
        """
        has_landed, self.has_landed, self.is_postponed = self.has_landed, False, False
        if self.has_been_read and has_slot:
            self.has_been_read = False
            return True
        lacking = goes_on and any(one.lacks_lora for one in waiting)
        if self.flight is not None or not has_slot or not (self.due or lacking):
            return False
        self.is_postponed = has_landed and not self.due
        if self.is_postponed:
            return False
        queue, owners = by_policy(waiting, self._limits, memory), memory.owners
        self.flight = self._of_call(self.due.pop(0), queue, owners) if self.due else self._of_requests(queue, owners)
        if self.flight is None:
            return False
        if self.flight.victim is not None:
            self.flight.victim.version = 0
        says = self.flight.says
        self.being_read = says.path is not None
        if self.being_read:
            self.orders.append(LoraOrder(says.version, says.name, says.path))
        return not self.being_read

    def read(self, event: LoraRead, waiting: Iterable[Request]) -> tuple[list[Answer], list[Request]]:
        """Handle the end of a read. Returns the answers, and the requests that are left without their LoRA."""
        if self.flight is None or not self.being_read or self.flight.says.version != event.version:
            return [], []
        self.being_read = False
        if event.error is None:
            self.has_been_read = True
            return [], []
        self.orders.append(LoraOrder(event.version, self.flight.says.name))
        return self.land(event.error, 0, waiting)

    def take_orders(self) -> tuple[LoraOrder, ...]:
        """Take this step's orders to the stages."""
        if not self.orders:
            return ()
        orders, self.orders = tuple(self.orders), []
        return orders

    def land(self, error: str | None, launched: int, waiting: Iterable[Request]) -> tuple[list[Answer], list[Request]]:
        """Handle the result of a change. Returns the answers, and the requests that are left without their LoRA."""
        assert self.flight is not None
        landed, self.flight, self.has_landed = self.flight, None, True
        call, lora, says, victim = landed.call, landed.lora, landed.says, landed.victim
        fault = ("fault", None if error is None or says.path is None else "path")
        answers: list[Answer] = [] if call is None else [(call, error is None, error or "successfully", fault)]
        if error is not None:
            lora.is_leaving = lora.is_leaving and says.path is not None
            if victim is not None:
                victim.version = says.drop
            return answers, _users_of(lora, waiting) if call is None else []
        if says.path is None:
            del self.known[lora.name]
            return answers, []
        self.known[lora.name] = lora
        lora.version, lora.used = (0 if says.drop == says.version else says.version), launched
        self._totals["lora_loads"] += 1
        self._totals["lora_evictions"] += victim is not None
        return answers, []

    def _of_call(self, call: _Call, queue: Sequence[Request], owners: Sequence[Request]) -> SpecifiedChange:
        if isinstance(call, UnloadLora):
            lora = self.known[call.name]
            return SpecifiedChange(call, lora, LoraChange(call.name, drop=lora.version), None)
        wanted = [request.lora for request in queue if request.lora is not None]
        new, version = Lora(call.name, call.path), self._totals["lora_loads"] + 1
        found = self._loading(call, new, wanted, owners)
        # A LoRA without a place is read, checked and forgotten.
        return found or SpecifiedChange(call, new, LoraChange(call.name, version, call.path, version), None)

    def _of_requests(self, queue: Sequence[Request], owners: Sequence[Request]) -> SpecifiedChange | None:
        """**LoRAs**: a load takes no place from the LoRA of an earlier request in the queue."""
        before: list[Lora] = []
        for request in queue:
            if request.lora is not None and request.lacks_lora:
                return self._loading(None, request.lora, before, owners)
            before += [request.lora] if request.lora is not None else []
        return None

    def _loading(
        self, call: LoadLora | None, lora: Lora, wanted: Sequence[Lora], owners: Sequence[Request]
    ) -> SpecifiedChange | None:
        """**LoRAs**: load into a free place, or replace the idle LoRA that was used least recently."""
        victim: Lora | None = None
        if len(self.resident) >= self._limits.max_loras:
            in_use = [*wanted, *[owner.lora for owner in owners]]
            idle = [one for one in self.resident if one not in in_use]
            if not idle:
                return None
            victim = min(idle, key=lambda one: (one.used, one.version))
        drop, version = 0 if victim is None else victim.version, self._totals["lora_loads"] + 1
        return SpecifiedChange(call, lora, LoraChange(lora.name, version, lora.path, drop), victim)


def _users_of(lora: Lora | None, everyone: Iterable[Request]) -> list[Request]:
    """Return the requests that use a LoRA, each once: a request may both live and own memory."""
    return [one for one in dict.fromkeys(everyone) if one.lora is not None and one.lora is lora]
