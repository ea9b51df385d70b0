"""The oracle of every scheduler: promises judged from events, launches and replies of any type.

A request computes each position once, in order, and only while it lives; its client gets one end and nothing after
it; limits hold; each call is answered once; every request ends. An adapter's oracle adds its scheduler's promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

from typing_extensions import TypeVar

from scripted.core.account import Account, Life
from scripted.core.machine import DeviceT, EventT, MachineT, OutputT
from scripted.core.violation import Violation


class Pausing(Protocol):
    """A mode of pause: no launches at all (``stops_running``), or no new requests; ``aborts``: live requests end."""

    @property
    def name(self) -> str: ...

    @property
    def stops_running(self) -> bool: ...

    @property
    def aborts(self) -> bool: ...


class Paused(NamedTuple):
    """A mode of pause, by default one in which nothing is launched until it ends."""

    name: str
    stops_running: bool = True
    aborts: bool = False


@dataclass(frozen=True)
class RequestedWork:
    """The steps that requests take one after another, and the one with the most new tokens."""

    steps: int
    rid: str
    new: int

    def __add__(self, other: RequestedWork) -> RequestedWork:
        longest = max(self, other, key=lambda one: one.new)
        return RequestedWork(self.steps + other.steps, longest.rid, longest.new)


class Oracle(Generic[EventT, OutputT, MachineT, DeviceT]):
    """Base class of oracles. A subclass feeds it events, replies and launches; it never changes the run.

    A subclass defines ``after_step``, ``at_rest`` and ``at_end``.

    At most ``depth`` batches may be in flight, each of at most ``batch_requests`` requests and ``batch_tokens`` tokens,
    or of ``prompt_tokens`` if it has prompts and these are fewer.
    Without ``ended_take_seats`` aborted requests do not count as members of a batch. ``paused`` is the mode of the
    current pause. ``context_tokens``, ``late_launches``, ``block_size`` and ``most_in_vain`` go to the account.
    """

    def __init__(
        self,
        *,
        depth: int,
        batch_requests: int,
        batch_tokens: int,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
        late_launches: int = 0,
        block_size: int = 1,
        most_in_vain: int = 1,
        ended_take_seats: bool = True,
    ) -> None:
        self.account = Account(context_tokens, late_launches, block_size, most_in_vain)
        self.paused: Pausing | None = None
        self._depth = depth
        self._batch_requests = batch_requests
        self._ended_take_seats = ended_take_seats
        self._batch_tokens = batch_tokens
        self._prompt_tokens = batch_tokens if prompt_tokens is None else prompt_tokens
        self._flights: dict[int, Sequence[str]] = {}
        # The last batch was at most half full.
        self.has_room = False

    def after_step(self, events: Sequence[EventT], stepped: OutputT, machine: MachineT, device: DeviceT) -> None:
        """Judge one step. Raises Violation."""
        raise NotImplementedError(f"{type(self).__name__} judges no steps; define after_step")

    def at_rest(self, machine: MachineT) -> None:
        """Judge the machine after every request has ended, with its cache still filled. Raises Violation."""
        raise NotImplementedError(f"{type(self).__name__} judges no machine at rest; define at_rest")

    def at_end(self, machine: MachineT) -> None:
        """Judge the machine after ``Adapter.finale`` has cleaned up. Raises Violation."""
        raise NotImplementedError(f"{type(self).__name__} judges no end; define at_end")

    @property
    def is_settled(self) -> bool:
        """Whether every request has ended and every call has been answered."""
        return self.account.is_settled

    @property
    def could_go_on(self) -> Iterable[Life]:
        """The open requests that no pause blocks."""
        lives = self.account.live.values()
        if self.paused is None:
            return lives
        return () if self.paused.stops_running else [life for life in lives if life.computed is not None]

    @property
    def fit_together(self) -> bool | None:
        """Whether memory has room for all open requests at once, outputs included; None if that is unknown."""
        return None

    @property
    def fit_hint(self) -> str:
        """The declaration that lets such requests wait, as the end of a finding's text; empty if there is none."""
        return ""

    def waits_for_deadline(self, stepped: OutputT) -> bool:  # noqa: ARG002
        """Return whether open requests depend on the deadline of a step; without a timer it only ends requests."""
        return False

    def most_new(self, life: Life) -> int:
        """Return the most tokens that a request may output."""
        most: int = life.message.max_new_tokens
        return most

    @property
    def work_left(self) -> int | None:
        """The steps that all open requests would take one after another; None if unknown."""
        steps = 0
        for life in self.account.live.values():
            tokens = len(life.message.prompt_ids) + len(life.said) - (life.computed or 0)
            steps += self._steps_alone(tokens, self.most_new(life) - len(life.said))
        return steps

    @property
    def requested_work(self) -> RequestedWork:
        """The work that all requests of the run ask for, each computed once and alone."""
        work = RequestedWork(0, "", 0)
        for life in self.account.lives:
            new = self.most_new(life) if life.end is None else len(life.said)
            work += RequestedWork(self._steps_alone(len(life.message.prompt_ids), new), life.message.rid, new)
        return work

    def _steps_alone(self, tokens: int, new: int) -> int:
        """Return the steps in which these tokens are computed, and ``new`` tokens are sampled, one in a batch."""
        return (-(-max(0, tokens) // self._prompt_tokens) + max(1, new)) * (self._depth + 1)

    @property
    def names(self) -> Iterable[str]:
        """The rids of all requests, in which the texts of one failure may differ."""
        return (life.message.rid for life in self.account.lives)

    def is_live(self, rid: str) -> bool:
        """Return whether a request with this rid has begun and not yet ended."""
        return rid in self.account.live

    def pause(self, mode: Pausing) -> None:
        self.paused = mode
        if mode.aborts:
            self.account.abort_all()

    def resume(self) -> None:
        self.paused = None

    def launch(self, batch_id: int, rids: Sequence[str], tokens: int) -> None:
        """Judge the launch of a batch. Raises Violation."""
        if batch_id in self._flights:
            raise Violation(f"batch {batch_id} is launched, but one of this id is in flight")
        self._flights[batch_id] = rids
        self.has_room = 2 * tokens <= self._batch_tokens
        if len(self._flights) > self._depth:
            raise Violation(f"{len(self._flights)} batches are in flight, of at most {self._depth}")
        if not rids:
            return
        if self.paused is not None:
            self._check_paused(batch_id, rids, self.paused)
        if len(set(rids)) != len(rids):
            raise Violation(f"batch {batch_id} has a request twice: {', '.join(rids)}")
        if len(rids) > self._batch_requests:
            self._check_seats(batch_id, rids)
        if tokens > self._batch_tokens:
            raise Violation(f"batch {batch_id} computes {tokens} tokens, of at most {self._batch_tokens}")

    def _check_seats(self, batch_id: int, rids: Sequence[str]) -> None:
        """Judge a batch with more requests than seats; some requests may take none. Raises Violation."""
        live, seats = self.account.live, self._batch_requests
        aborted = [rid for rid in rids if rid in live and live[rid].aborted]
        hint = ""
        if len(rids) - len(aborted) <= seats:
            if not self._ended_take_seats:
                return
            hint = (
                f"; clients have aborted {', '.join(aborted)}: Capabilities(ended_take_seats=False) says that what has "
                "ended takes no seat"
            )
        raise Violation(f"batch {batch_id} has {len(rids)} requests, of at most {seats}{hint}")

    def land(self, batch_id: int, *, failed: bool = False) -> None:
        rids = self._flights.pop(batch_id, ())
        if failed:
            self.account.fail(rids)

    def _check_paused(self, batch_id: int, rids: Sequence[str], mode: Pausing) -> None:
        if mode.stops_running:
            raise Violation(f"batch {batch_id} is launched while generation is paused ({mode.name})")
        for rid in rids:
            life = self.account.live.get(rid)
            if life is not None and not life.launched:
                raise Violation(f"{rid} begins in batch {batch_id} while generation is paused ({mode.name})")


OracleT = TypeVar("OracleT", bound=Oracle, default=Any)
