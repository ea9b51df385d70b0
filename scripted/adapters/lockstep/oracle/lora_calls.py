"""What was promised of LoRAs: each is computed with what was loaded, never dropped while in use, never too many.

Fed with calls, launches, results and answers by the account of clients. It sees plans and replies only.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from engine.limits import Limits
from engine.messages import CallAnswer, LoadLora, UnloadLora
from engine.plan import LoraChange, Segment
from scripted.core.violation import Violation

__all__ = ["LoraCalls"]


class _Held(NamedTuple):
    """What the stages hold by a version."""

    name: str
    path: str


class LoraCalls:
    """``paths`` are the LoRAs that requests may ask for, by name; ``held`` what the stages hold, by version."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_loras
        self.paths = dict(limits.loras)
        self.held: dict[int, _Held] = {}
        self.loads = self.evictions = 0
        self._seen: set[int] = set()
        self._open: dict[str, LoadLora | UnloadLora] = {}
        self._flight: LoraChange | None = None
        # The calls that keep new requests from a LoRA, by its name, and the name whose unload waits for requests.
        self._leaving: dict[str, str] = {}
        self._waiting: str | None = None
        # The call that asked for what is in flight, and the one whose result came in this step, with its error.
        self._call: str | None = None
        self._landed: tuple[str | None, str | None] | None = None

    def ask(self, call: LoadLora | UnloadLora, *, is_used: bool) -> None:
        """Note a call. An unload of what no request uses is not refused; one that may wait takes no more requests."""
        self._open[call.call_id] = call
        if not isinstance(call, UnloadLora) or call.name not in self.paths or call.name in self._leaving:
            return
        if not is_used or (call.timeout_s is not None and self._waiting is None):
            self._leaving[call.name] = call.call_id
            self._waiting = call.name if is_used else self._waiting

    def may_ask_for(self, name: str) -> bool:
        """Whether a request that arrives now may ask for a LoRA of this name."""
        return name in self.paths and name not in self._leaving

    def versions_of(self, name: str) -> Container[int]:
        """The versions of a LoRA that the stages hold."""
        return [version for version, held in self.held.items() if held.name == name]

    def is_asked_for(self, change: LoraChange) -> bool:
        """Whether a call asked for this change, and not a request."""
        return change.path is None or change.name not in self.paths

    def launch(self, change: LoraChange, in_use: Container[int], *, is_used: bool) -> None:
        """The stages are told. ``in_use`` are the versions that requests own memory with. Raises Violation.

        ``is_used``: a request of this LoRA is alive or owns memory.
        """
        if self._flight is not None:
            raise Violation(f"LoRAs are changed by {change} while {self._flight} is in flight")
        if change.drop in in_use and change.drop:
            raise Violation(f"version {change.drop} of a LoRA is dropped while a request is computed with it")
        if change.path is None and is_used:
            raise Violation(f"LoRA {change.name!r} is unloaded while a request uses it")
        if change.drop not in (0, change.version) and change.drop not in self.held:
            raise Violation(f"version {change.drop} of a LoRA is dropped, but the stages hold {self.held}")
        if change.path is not None and change.version in self._seen:
            raise Violation(f"version {change.version} is given to a LoRA twice: KV of the first would be found")
        stays = change.path is not None and change.drop != change.version
        if stays and len(self.held) - (change.drop in self.held) >= self._most:
            raise Violation(f"{change} makes {len(self.held) + 1} LoRAs resident, max_loras is {self._most}")
        self._flight = change
        kind = UnloadLora if change.path is None else LoadLora
        asked = [one.call_id for one in self._open.values() if type(one) is kind and one.name == change.name]
        self._call = asked[0] if asked else None

    def land(self, error: str | None) -> LoraChange:
        """The stages have changed, or none has; returns what they were told."""
        change, self._flight = self._flight, None
        assert change is not None, "the result of a change belongs to a microbatch that was launched"
        self._landed, self._call = (self._call, error), None
        if change.path is None:
            self._leaving.pop(change.name, None)
        if error is None:
            self._take(change)
        return change

    def lose(self) -> None:
        """The pipeline is dead: nothing comes back."""
        self._flight = self._landed = self._call = None

    def computes(self, segment: Segment, name: str | None) -> None:
        """A segment is planned for a request of this LoRA. Raises Violation where another one computes it."""
        held = self.held.get(segment.lora)
        if name is None and segment.lora == 0:
            return
        if held is None or held.name != name or held.path != self.paths.get(held.name):
            raise Violation(f"{segment.rid} asks for LoRA {name!r}, but version {segment.lora} computes it: {held}")
        if self._flight is not None and self._flight.drop == segment.lora:
            raise Violation(f"{segment.rid} is computed with version {segment.lora}, which is being dropped")

    def answered(self, answer: CallAnswer) -> None:
        """Raise Violation for an answer that the stages and the requests do not account for."""
        call = self._open.pop(answer.call_id, None)
        if call is None:
            return
        what = f"{type(call).__name__} of {call.name!r}"
        if self._leaving.get(call.name) == call.call_id:
            del self._leaving[call.name]
            self._waiting = None if self._waiting == call.name else self._waiting
        landed, error = (None, None) if self._landed is None else self._landed
        if landed == call.call_id:
            if answer.ok is (error is not None):
                raise Violation(f"{what} is answered {answer.message!r}, but its error is {error}")
        elif answer.ok:
            raise Violation(f"{what} is answered {answer.message!r} without a result")

    def end_step(self) -> None:
        """Forget what belongs to this step only."""
        self._landed = None

    def _take(self, change: LoraChange) -> None:
        if change.path is None:
            self.paths.pop(change.name, None)
        else:
            self.paths[change.name] = change.path
            self._seen.add(change.version)
            self.held[change.version] = _Held(change.name, change.path)
            self.loads += 1
            self.evictions += change.drop not in (0, change.version)
        self.held.pop(change.drop, None)
