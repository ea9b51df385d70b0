"""The adapter ``vllm-fleet``: vLLM's schedulers as producers and consumers of KV, as one machine for the search.

A producer first computes a consumer's request up to one token, as the proxies in vLLM's examples do. It keeps the
blocks; the consumer pulls them and reports when it has them. A consumer computes lost KV itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from scripted.core.forks import Frozen
from scripted.core.states import StateReader
from scripted.core.violation import Violation
from scripted.fleets.adapter import FleetAdapter
from scripted.fleets.machine import FleetConfig, FleetMachine, FleetRun, MemberRun, SearchedMember
from scripted.fleets.space import FleetSpace
from scripted.script.fleet import role_in
from scripted.sdk import Abort, Add, Refused, Signal, Tokens
from scripted.sdk.actions import message_of
from scripted_vllm.actions import ENDED, EndSession, HoldCompilation, OfferPrefixes, ReleaseCompilation, SendMore
from scripted_vllm.adapter import ADAPTER as VLLM
from scripted_vllm.adapter import COPIER
from scripted_vllm.config import VllmSettings
from scripted_vllm.ids import rid_of

NAME: Final = "vllm-fleet"
_NOT_HERE: Final = (OfferPrefixes, HoldCompilation, ReleaseCompilation, SendMore, EndSession)
_LEFT_OUT: Final = {
    "sliding_window", "attention_chunk_size", "mamba_cache_mode", "prefix_match_unit", "kv_connector", "kv_role",
    "kv_offered_tokens", "kv_saves", "kv_saves_aborted", "kv_transfer_steps", "structured_output", "grammar_steps",
    "encoder_cache_size",
    "encoder_compute_budget", "disable_chunked_mm_input", "grammars", "sessions", "images", "enable_kv_cache_events",
    "kv_cache_report_mode", "swa_bounded_replay", "hisparse_host_blocks", "hisparse_hot_blocks",
    "ec_connector", "ec_transfer_steps", "is_encoder_decoder",
}  # fmt: skip
_STATES: Final = StateReader()
_LOST: Final = 1


# -- messages between engines; each identifies the prompt by the consumer's number --


class Wanted(msgspec.Struct, frozen=True):
    """A consumer's proxy requests the KV of a prompt."""

    number: int
    prompt_ids: tuple[int, ...]
    priority: int
    lora: int


class Dropped(msgspec.Struct, frozen=True):
    """The consumer no longer needs a prompt or its KV."""

    number: int


class Computed(msgspec.Struct, frozen=True):
    """The producer has computed a prompt and keeps its KV; ``is_there`` is False if the prompt ended before that."""

    number: int
    is_there: bool


class Pull(msgspec.Struct, frozen=True):
    """The consumer reads the KV of these tokens, starting at position ``start``."""

    number: int
    start: int
    token_ids: tuple[int, ...]


class Blocks(msgspec.Struct, frozen=True):
    """The KV that the consumer read, unless it ``is_gone``."""

    is_bulk: ClassVar[bool] = True

    number: int
    is_gone: bool


@dataclass
class KeptBlocks:
    """A prompt that a producer keeps. ``read`` is the pending request for its blocks."""

    rid: str
    read: Pull | None = None


@dataclass
class ProxiedPrompt:
    """A consumer's request and its producer. ``message`` waits for the prompt, and is None afterwards."""

    rid: str
    at: str
    message: Add | None


class ProxiedRun(MemberRun):
    """A run whose requests may wait for another engine before their scheduler gets them."""

    proxy: Proxy

    def give(self, event: Any) -> None:
        if not self.proxy.takes(event):
            super().give(event)

    def _check_waits(self) -> None:
        # A request whose KV is in transit waits for another engine.
        if not self.machine.transfers.under_way:
            super()._check_waits()

    def is_live(self, rid: str) -> bool:
        return super().is_live(rid) or rid in self.proxy.waiting


class Proxy:
    """The proxy in front of a consumer, which has producers compute prompts. In front of a producer it does nothing.

    ``prompts`` has the open prompts by number.
    """

    def __init__(self, member: VllmMember, producers: Sequence[str]) -> None:
        self._member = member
        self._run = member.run
        self._producers = tuple(producers)
        self._reached: set[str] = set()
        self._count = 0
        self.prompts: dict[int, ProxiedPrompt] = {}

    @property
    def waiting(self) -> dict[str, int]:
        """The requests that the scheduler has not received."""
        return {one.rid: number for number, one in self.prompts.items() if one.message is not None}

    def on_connected(self, other: str) -> None:
        """Note a producer."""
        if other in self._producers:
            self._reached.add(other)

    def on_disconnected(self, other: str) -> None:
        """Lose a producer: compute the prompts that it has not sent."""
        self._reached.discard(other)
        for number, one in list(self.prompts.items()):
            if one.at == other:
                self.lose(number)

    def takes(self, event: Any) -> bool:
        """Whether the proxy withholds an event from the scheduler, perhaps for good."""
        if isinstance(event, Abort) and event.rid in self.waiting:
            number = self.waiting[event.rid]
            self._member.said.append((self.prompts.pop(number).at, Dropped(number)))
            return True
        reached = [name for name in self._producers if name in self._reached]
        if not isinstance(event, Add) or not reached:
            return False
        self._count += 1
        at = reached[self._count % len(reached)]
        self.prompts[self._count] = ProxiedPrompt(event.rid, at, event)
        self._member.said.append((at, Wanted(self._count, event.prompt_ids, event.priority, event.lora)))
        return True

    def lose(self, number: int) -> None:
        """Note that a prompt's KV will not arrive."""
        one = self.prompts.pop(number, None)
        if one is None:
            return
        if one.message is not None:
            self._run.arrived.append(one.message)
            return
        connector = self._connector
        if one.rid in connector.coming:
            del connector.coming[one.rid]
            return
        request_id = self._take_number(number)
        if connector.promised.pop(request_id, None) is None:
            self._end_load(request_id, _LOST)

    def receive(self, message: Computed | Blocks) -> None:
        one = self.prompts.get(message.number)
        match message:
            case Computed():
                if one is None or one.message is None:
                    return
                if not message.is_there:
                    self.lose(message.number)
                    return
                self._connector.coming[one.rid] = len(one.message.prompt_ids), message.number
                self._run.arrived.append(one.message)
                one.message = None
            case Blocks():
                if one is None:
                    return
                if message.is_gone:
                    self.lose(message.number)
                    return
                self._end_load(self._take_number(message.number), 0)
                self._member.said.append((one.at, Dropped(message.number)))
                del self.prompts[message.number]

    def after_step(self) -> None:
        """Request the KV that the connector wants, and drop the KV that it no longer needs."""
        connector = self._connector
        for load in self._run.machine.transfers.take_asked():
            number = connector.numbers[load.request_id]
            self._member.said.append((self.prompts[number].at, Pull(number, load.start, load.token_ids)))
        for request_id in connector.take_unused():
            number = connector.numbers.pop(request_id)
            self._member.said.append((self.prompts.pop(number).at, Dropped(number)))

    def _take_number(self, number: int) -> str:
        """Return the request with this number, whose transfer has ended."""
        numbers: dict[str, int] = self._connector.numbers
        request_id = next(one for one, its in numbers.items() if its == number)
        del numbers[request_id]
        return request_id

    def _end_load(self, request_id: str, value: int) -> None:
        self._run.arrived.append(Signal(name=ENDED, rid=request_id, value=value))

    @property
    def _connector(self) -> Any:
        return self._run.machine.scheduler.connector


class VllmMember(SearchedMember):
    """One of vLLM's schedulers in its role."""

    def __init__(self, name: str, run: ProxiedRun, producers: Sequence[str]) -> None:
        super().__init__(name)
        self.run = run
        run.machine.transfers.is_remote = run.machine.scheduler.connector.is_remote = True
        self.proxy = run.proxy = Proxy(self, producers if name[0] == "d" else ())
        self.kept: dict[tuple[str, int], KeptBlocks] = {}
        # Requests whose end the scheduler has not processed.
        self.ending: set[str] = set()
        self._begun = 0

    def step(self) -> None:
        if not self.run.advance():
            return
        self.proxy.after_step()
        owners = {one.rid: key for key, one in self.kept.items()}
        previous = self.run.previous
        for reply in () if previous is None else previous.replies:
            if isinstance(reply, (Tokens, Refused)) and reply.rid in owners:
                self._ended(owners[reply.rid], reply)
        # A dropped prompt may have been computed in the same step.
        kept = self.run.machine.scheduler.connector.kept
        self.ending &= kept.keys()
        for request_id in [one for one in kept if rid_of(one) not in owners and one not in self.ending]:
            self.end_save(request_id)

    def receive(self, sender: str, message: Any) -> None:
        key = sender, message.number
        match message:
            case Computed() | Blocks():
                self.proxy.receive(message)
            case Wanted():
                self._begin(key, message)
            case Pull():
                is_gone = key not in self.kept
                if not is_gone:
                    self.kept[key].read = message
                    self._check_read(key)
                self.said.append((sender, Blocks(message.number, is_gone)))
            case Dropped():
                self._check_read(key)
                self._drop(key)

    def on_unsent(self, receiver: str, message: Any) -> None:
        del receiver
        if isinstance(message, (Wanted, Pull)):
            self.proxy.lose(message.number)

    def on_connected(self, other: str) -> None:
        self.proxy.on_connected(other)

    def on_disconnected(self, other: str) -> None:
        self.proxy.on_disconnected(other)
        for key in [key for key in self.kept if key[0] == other]:
            self._drop(key)

    @property
    def is_quiet(self) -> bool:
        return super().is_quiet and not (self.kept or self.proxy.prompts)

    def check_quiet(self) -> None:
        left = len(self.kept) + len(self.proxy.prompts)
        if left:
            raise Violation(f"nothing is on its way, but {left} prompts are kept for others or awaited from them")

    # -- a producer --

    def _begin(self, key: tuple[str, int], wanted: Wanted) -> None:
        if self.is_draining:
            self.said.append((key[0], Computed(wanted.number, is_there=False)))
            return
        self._begun += 1
        # A restarted consumer counts from 1 again.
        run, rid = self.run, f"{key[0]}.{self._begun}"
        self.kept[key] = KeptBlocks(rid)
        add = message_of(run, rid, wanted.prompt_ids, 1, priority=wanted.priority, lora=wanted.lora)
        run.device.begin(add)
        run.give(add)

    def _ended(self, key: tuple[str, int], reply: Tokens | Refused) -> None:
        reason = None if isinstance(reply, Refused) else reply.finish_reason
        if isinstance(reply, Tokens) and reason is None:
            return
        is_there = reason == "length"
        if not is_there:
            del self.kept[key]
        self.said.append((key[0], Computed(key[1], is_there)))

    def _check_read(self, key: tuple[str, int]) -> None:
        """Check that a consumer finds the KV of its prompt from its request until it reports the end of its read."""
        one = self.kept.get(key)
        if one is None or one.read is None:
            return
        block_ids = self._blocks_of(one.rid)[1]
        if not self.run.device.holds(one.rid, block_ids, one.read.start, len(one.read.token_ids)):
            raise Violation(
                f"{key[0]} reads blocks {list(block_ids)}, which are kept for it, but do not hold the KV of its prompt "
                f"from position {one.read.start} to {len(one.read.token_ids) - 1}"
            )

    def _drop(self, key: tuple[str, int]) -> None:
        one = self.kept.pop(key, None)
        if one is None:
            return
        request_id, _ = self._blocks_of(one.rid)
        if request_id:
            self.end_save(request_id)
        else:
            self.run.give(Abort(rid=one.rid))

    def _blocks_of(self, rid: str) -> tuple[str, tuple[int, ...]]:
        """Return a request's internal name and its kept blocks; none for a running one."""
        kept = self.run.machine.scheduler.connector.kept
        return next(((name, block_ids) for name, block_ids in kept.items() if rid_of(name) == rid), ("", ()))

    def end_save(self, request_id: str) -> None:
        """Release the request's blocks."""
        self.ending.add(request_id)
        self.run.give(Signal(name=ENDED, rid=request_id, value=0))


class VllmFleets(FleetAdapter):
    """Fleets of vLLM's schedulers."""

    name = NAME
    of = "vllm"
    roles: Mapping[str, str] = {"p": "kv_producer", "d": "kv_consumer"}
    inner_actions = tuple(kind for kind in VLLM.actions if kind not in _NOT_HERE)
    space = FleetSpace(NAME, lambda: VLLM.space, left_out=_LEFT_OUT)
    workloads: Mapping[str, str] = {
        "one": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"',
        "again": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14"; 12 begin on=d0 do="start b prompt=14 new=4"',
        "several": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"; 2 begin on=d0 do="start b prompt=9 '
        'seed=1"; 3 begin on=d0 do="start c prompt=17 new=4"',
        "pair": 'engines=p0,p1,d0,d1; 1 begin on=d0 do="start a prompt=14 new=3"; 1 begin on=d1 do="start b prompt=11 '
        'new=3"; 3 begin on=d0 do="start c prompt=12 seed=2"; 4 begin on=d1 do="start e prompt=14"',
        "tight": 'engines=p0,d0 num_gpu_blocks=9; 1 begin on=d0 do="start a prompt=17 new=6"; 2 begin on=d0 do="start '
        'b prompt=15 seed=1 new=6"; 3 begin on=d0 do="start c prompt=13 seed=2 new=3"',
    }

    def config_of(self, config: FleetConfig[VllmSettings], name: str) -> VllmSettings:
        role, saves = role_in(self.roles, name), name[0] == "p"
        return msgspec.structs.replace(
            config.engine, kv_connector="async", kv_role=role, kv_saves=saves, kv_offered_tokens=0
        )

    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> VllmMember:
        run = ProxiedRun(self.config_of(config, name), self.of, machine.clock, record=record)
        return VllmMember(name, run, [one for one in config.names if one[0] == "p"])

    def version_check(self) -> tuple[bool, str]:
        """Return whether the adapter was tested with the installed version, and a sentence that says so."""
        return VLLM.version_check()

    def fleet_digest(self, run: FleetRun) -> bytes:
        known = [
            (one.name, one.kept, one.ending, one.is_draining, one.proxy.prompts)
            for one in run.machine.living
            if isinstance(one, VllmMember)
        ]
        return _STATES.digest(run.machine.fleet.links, known)

    def freeze(self, run: FleetRun) -> Frozen[FleetRun]:
        return Frozen(run, COPIER)


ADAPTER: Final = VllmFleets()
