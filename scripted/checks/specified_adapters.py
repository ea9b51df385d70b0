"""The adapters of the executable specification: which requests may ask for, which the stages hold, what changes next.

Names in bold are the rules of docs/architecture.md, "The rules of a step". It knows requests only as they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.limits import Limits
from engine.messages import LoadAdapter, UnloadAdapter
from engine.plan import AdapterChange
from scripted.checks.specified_request import SpecifiedAdapter as Adapter
from scripted.checks.specified_request import SpecifiedRequest

__all__ = ["SpecifiedAdapters", "SpecifiedChange"]


@dataclass(frozen=True, eq=False)
class SpecifiedChange:
    """A change: the call that asks for it, if one does, the adapter, and the one that makes room for it."""

    call: LoadAdapter | UnloadAdapter | None
    adapter: Adapter
    says: AdapterChange
    victim: Adapter | None


class SpecifiedAdapters:
    """``due`` are the calls that were accepted, ``flight`` is the change in flight, ``loads`` how many were loaded."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_loras
        self.known = {name: Adapter(name, path) for name, path in limits.loras}
        self.due: list[LoadAdapter | UnloadAdapter] = []
        self.flight: SpecifiedChange | None = None
        self.loads = self.evictions = 0
        self.has_landed = False

    @property
    def resident(self) -> list[Adapter]:
        """Those that the stages hold."""
        return [one for one in self.known.values() if one.version]

    def may_ask_for(self, name: str) -> bool:
        """**Refuse**: an adapter that is not loaded, or is being unloaded."""
        return name in self.known and not self.known[name].is_leaving

    def why_not_load(self, call: LoadAdapter) -> str | None:
        """**Adapters**: a name is free until it is loaded, and again once it is unloaded."""
        names = [*self.known, *[one.name for one in self.due]]
        names += [self.flight.says.name] if self.flight is not None else []
        return "no adapters" if not self._most else "already been loaded" if call.name in names else None

    # -- **Changes** --

    def change(self, queue: Sequence[SpecifiedRequest], owners: Sequence[SpecifiedRequest], *, goes_on: bool) -> bool:
        """One at a time: calls in their order, then the first request in the queue that lacks its adapter.

        ``queue`` is in the order of the policy; ``goes_on`` unless generation is paused. False where there is none.
        """
        if self.due:
            self.flight = self._of_call(self.due.pop(0), queue, owners)
        elif goes_on and not self.has_landed:
            before: list[Adapter] = []
            for request in queue:
                if request.lacks_adapter:
                    assert request.adapter is not None
                    self.flight = self._loading(None, request.adapter, before, owners)
                    break
                before += [request.adapter] if request.adapter is not None else []
        if self.flight is not None and self.flight.victim is not None:
            self.flight.victim.version = 0
        return self.flight is not None

    def land(self, error: str | None, launched: int) -> SpecifiedChange:
        """Every stage has changed, or none."""
        assert self.flight is not None
        landed, self.flight = self.flight, None
        adapter, says, victim = landed.adapter, landed.says, landed.victim
        if error is not None:
            adapter.is_leaving = adapter.is_leaving and says.path is not None
            if victim is not None:
                victim.version = says.drop
        elif says.path is None:
            del self.known[adapter.name]
        else:
            self.known[adapter.name] = adapter
            adapter.version, adapter.used = (0 if says.drop == says.version else says.version), launched
            self.loads, self.evictions = self.loads + 1, self.evictions + (victim is not None)
        return landed

    def _of_call(
        self,
        call: LoadAdapter | UnloadAdapter,
        queue: Sequence[SpecifiedRequest],
        owners: Sequence[SpecifiedRequest],
    ) -> SpecifiedChange:
        if isinstance(call, UnloadAdapter):
            adapter = self.known[call.name]
            return SpecifiedChange(call, adapter, AdapterChange(call.name, drop=adapter.version), None)
        wanted = [request.adapter for request in queue if request.adapter is not None]
        new, version = Adapter(call.name, call.path), self.loads + 1
        found = self._loading(call, new, wanted, owners)
        # Without a place for it, it is read, and forgotten again.
        return found or SpecifiedChange(call, new, AdapterChange(call.name, version, call.path, version), None)

    def _loading(
        self,
        call: LoadAdapter | None,
        adapter: Adapter,
        wanted: Sequence[Adapter],
        owners: Sequence[SpecifiedRequest],
    ) -> SpecifiedChange | None:
        """**Adapters**: into a free place, or into that of the idle one that was used longest ago."""
        victim: Adapter | None = None
        if len(self.resident) >= self._most:
            in_use = [*wanted, *[owner.adapter for owner in owners]]
            idle = [one for one in self.resident if one not in in_use]
            if not idle:
                return None
            victim = min(idle, key=lambda one: (one.used, one.version))
        drop = 0 if victim is None else victim.version
        return SpecifiedChange(call, adapter, AdapterChange(adapter.name, self.loads + 1, adapter.path, drop), victim)
