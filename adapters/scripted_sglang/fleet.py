"""The adapter ``sglang-fleet``: SGLang's schedulers as prefill and decode servers, as one machine for the search.

A router sends each request to a decode server and to a prefill server with a room number, by which SGLang's own KV
managers find each other. Their messages and writes travel over the fleet's links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.core.action import Action
from scripted.core.forks import Frozen
from scripted.core.mutant import read_mutants
from scripted.core.states import UnreadableState
from scripted.core.violation import Violation
from scripted.fleets.adapter import FleetAdapter
from scripted.fleets.machine import FleetConfig, FleetEvent, FleetMachine, FleetRun, MemberRun, SearchedMember
from scripted.fleets.space import FleetSpace
from scripted.script.fleet import role_in
from scripted.sdk import Abort, Add, Load, Refused, Resume, Signal, Tokens
from scripted.sdk.actions import message_of
from scripted.search.mutant_search import Found
from scripted_sglang.actions import ACTIONS, NEEDED_BY_SETTINGS, ReleaseTiers
from scripted_sglang.adapter import ADAPTER as SGLANG
from scripted_sglang.adapter import COPIER, adapter_of
from scripted_sglang.config import ServedSettings, SglangSettings
from scripted_sglang.machine import SglangMachine
from scripted_sglang.roles import Decode, Prefill
from scripted_sglang.scheduler_view import rid_of
from scripted_sglang.transfers import BufferRow, Frames, PageWrite, Recompute, Written, room_that_fails

NAME: Final = "sglang-fleet"
MUTANTS: Final = read_mutants(Path(__file__).with_name("fleet_mutants.toml"))
# What the servers know of each other.
_ACQUAINTANCES: Final = (
    "decode_kv_args_table", "state_strides_validated", "failed_sessions", "session_failures", "prefill_info_table",
    "connection_pool", "addr_to_rooms_tracker", "deferred_bootstrap", "transfers.reached", "transfers.lost",
    "transfers.forsaken",
)  # fmt: skip
# SGLang never frees these for a room that was aborted at its prefill server or whose write failed (docs/sglang.md).
_FORGOTTEN: Final = (
    "_deferred_abort_ack_tracker", "request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len",
    "_staging_outstanding", "_deferred_ack_poisoned_rooms",
)  # fmt: skip

SERVER: Final = adapter_of(
    f"{__name__}:SERVER",
    ServedSettings,
    may_grow=(*_ACQUAINTANCES, *_FORGOTTEN),
    settings={
        "page_size": (4,),
        "schedule_conservativeness": (0.1, 0.3),
        "optimistic_prefill_attempts": (1, 2),
        "hicache_ratio": (0.5, 1.0),
    },
    actions=ACTIONS,
    needed=NEEDED_BY_SETTINGS,
    undoing=(ReleaseTiers(),),
    mutants=MUTANTS,
)
_WAKE: Final = Signal(name="transfers")
# A room consists of the engine's number and the request's number there.
_ROOMS: Final = 1000
# Caches are flushed in the last turn of the finale, and in the turn before unless a pause had to end first.
_FLUSHES: Final = 2


# -- messages from the router to a prefill server --


class Routed(msgspec.Struct, frozen=True):
    """A request that was also sent to a decode server."""

    room: int
    prompt_ids: tuple[int, ...]
    priority: int


class ClientLeft(msgspec.Struct, frozen=True):
    """The client of a request has disconnected, or the request ended at its decode server."""

    room: int


class GivenUp(msgspec.Struct, frozen=True):
    """A prefill server refused or ended a request, so the router aborts it at the decode server."""

    room: int


class RoutedRun(MemberRun):
    """A run of a scheduler with a role."""

    machine: SglangMachine
    router: Router | None = None

    def give(self, event: Any) -> None:
        """Give an event; abort a request at both of its servers."""
        if self.router is not None:
            event = self.router.passes(event)
        if event is not None:
            super().give(event)

    def give_here(self, event: Any) -> None:
        """Give an event to this server only."""
        super().give(event)

    @property
    def obstacle(self) -> Action | None:
        """Return the obstacle. An aborting pause holds the lock that a resume needs, so no resume ends it."""
        undo = super().obstacle
        is_stuck = self.machine._ending is not None  # noqa: SLF001 - the machine of this adapter
        return None if is_stuck and undo == self.adapter.resuming else undo

    def _check_waits(self) -> None:
        # Requests may wait for the other server.
        queues = self.machine.role.queues()
        if not any(queues.get(name) for name in ("bootstrap", "inflight", "prealloc", "transfer")):
            super()._check_waits()


class Router:
    """The router in front of a decode server, which selects the prefill server of each request."""

    def __init__(self, member: SglangMember, prefills: Sequence[str], made: int) -> None:
        self._member = member
        self._run = member.run
        self._prefills = tuple(prefills)
        self._made = made
        self._count = 0

    def passes(self, event: Any) -> Any:
        """Return the event for the decode server; None if the router answers it."""
        rooms = self._run.machine.role.rooms
        if isinstance(event, Abort) and event.rid in rooms and self._run.config.router_tells_both:
            self._member.said.append((rooms[event.rid][0], ClientLeft(rooms[event.rid][1])))
        if isinstance(event, Add) and self._run.machine.refusal_of(event) is None:
            reached = [name for name in self._prefills if name in self._run.machine.role.transfers.reached]
            if not reached:
                self._run.machine.unrouted.add(event.rid)
                return event
            self._count += 1
            room = self._made * _ROOMS + self._count
            at = reached[self._count % len(reached)]
            rooms[event.rid] = at, room
            self._member.said.append((at, Routed(room, event.prompt_ids, event.priority)))
        return event


class ServerHalf(msgspec.Struct, frozen=True):
    """A prefill server's half of a request, with its name ``rid`` there and its other server ``peer``."""

    rid: str
    peer: str
    prompt_ids: tuple[int, ...]


class SglangMember(SearchedMember):
    """One of SGLang's schedulers in its role."""

    run: RoutedRun

    def __init__(self, name: str, run: RoutedRun, prefills: Sequence[str], made: int) -> None:
        super().__init__(name)
        self.run = run
        run.router = Router(self, prefills, made) if name[0] == "d" else None
        transfers = run.machine.role.transfers
        transfers.local_ip, transfers.born = name, made
        # On a prefill server: by room, the server that has the other half of the request.
        self.halves: dict[int, ServerHalf] = {}

    @property
    def role(self) -> Any:
        return self.run.machine.role

    def step(self) -> None:
        if isinstance(self.role, Decode):
            # A retracted request needs its server again, which may be gone by now.
            awaiting = self._awaiting()
            rooms = self.role.rooms.items()
            self._excuse(
                [room for rid, (at, room) in rooms if rid in awaiting and at not in self.role.transfers.reached]
            )
        self.run.advance()
        if not self.run.stepped:
            return
        live = self.run.oracle.account.live
        if isinstance(self.role, Prefill):
            with self.run.machine.inside():
                self._begin_writes()
        if self.run.config.router_tells_both:
            self._tell_of_errors()
        if isinstance(self.role, Prefill):
            wanted = self.role.transfers.rooms_to_write
            self.halves = {room: one for room, one in self.halves.items() if one.rid in live or room in wanted}
        self.role.forget(live)

    def take_said(self) -> Sequence[tuple[str, Any]]:
        transfers = self.role.transfers
        self.said += transfers.said
        transfers.said = []
        return super().take_said()

    def receive(self, sender: str, message: Any) -> None:
        match message:
            case Frames():
                room = room_that_fails(message.parts, self.role.transfers)
                if room is not None:
                    self._excuse([room])
                self.role.transfers.inbox.append(message.parts)
            case PageWrite():
                self._take_pages(sender, message)
            case Written():
                self._end_write(message.chunk)
            case BufferRow():
                self.role.transfers.write_row(message)
            case Routed() | Recompute():
                self._begin(sender, message)
                return
            case ClientLeft():
                rid = self.role.rid_in(message.room)
                if rid is not None:
                    self.run.give(Abort(rid=rid))
                return
            case GivenUp():
                rid = self.role.rid_in(message.room)
                if rid is not None:
                    self.run.give_here(Abort(rid=rid))
                return
        self.run.give_here(_WAKE)

    def on_unsent(self, receiver: str, message: Any) -> None:
        """Note that a message was not sent because the connection broke, which both sides know."""

    def on_connected(self, other: str) -> None:
        if other[0] != self.name[0]:
            self.role.transfers.reached.add(other)
            self.run.give_here(_WAKE)

    def on_disconnected(self, other: str) -> None:
        transfers = self.role.transfers
        if other not in transfers.reached:
            return
        transfers.reached.discard(other)
        with self.run.machine.inside():
            if isinstance(self.role, Prefill):
                rooms = [room for room, one in self.halves.items() if one.peer == other]
                self._excuse(rooms)
                transfers.lose_decode(other, rooms)
            else:
                awaiting = self._awaiting()
                gone = [room for rid, (at, room) in self.role.rooms.items() if at == other and rid in awaiting]
                self._excuse(gone)
                self.role.lose(other)
        self.run.give_here(_WAKE)

    @property
    def is_quiet(self) -> bool:
        return super().is_quiet and not self.halves

    def _awaiting(self) -> set[str]:
        """Return the requests without KV: in SGLang's queues, or held back by a pause."""
        return {*self.role.awaiting(), *self.run.machine.held_back()}

    def _excuse(self, rooms: Iterable[int]) -> None:
        """Allow the requests in these rooms to end with an error."""
        self.run.oracle.fail([rid for rid in map(self.role.rid_in, rooms) if rid is not None])

    def _tell_of_errors(self) -> None:
        """Let the router abort requests at the other server that ended here before they were computed."""
        previous = self.run.previous
        ended = {
            reply.rid
            for reply in (() if previous is None else previous.replies)
            if isinstance(reply, Refused) or (isinstance(reply, Tokens) and reply.finish_reason in ("abort", "error"))
        }
        for rid in ended & self.role.rooms.keys():
            at, room = self.role.rooms[rid]
            half = self.halves.get(room)
            self.said.append((at, ClientLeft(room)) if half is None else (half.peer, GivenUp(room)))

    # -- a prefill server --

    def _begin(self, sender: str, message: Routed | Recompute) -> None:
        if self.is_draining:
            self.said.append((sender, GivenUp(message.room)))
            return
        rid = f"{sender}.{message.room}"
        while self.run.is_live(rid):
            rid += "+"
        self.role.rooms[rid] = self.name, message.room
        self.halves[message.room] = ServerHalf(rid, sender, message.prompt_ids)
        add = message_of(self.run, rid, message.prompt_ids, 1, priority=message.priority)
        self.run.device.begin(add)
        self.run.give_here(add)

    def _begin_writes(self) -> None:
        """Begin to write chunks to the decode servers' pages. Raises Violation."""
        machine = self.run.machine
        for number, chunk, info in self.role.transfers.begin_writes(machine.computed):
            half = self.halves[chunk.room]
            first, end = self._part_of(chunk, half, info)
            written = machine.pages_in_flight() & set(chunk.prefill_kv_indices.tolist())
            if written:
                raise Violation(
                    f"pages {sorted(written)} of {half.rid} are sent to {info.endpoint} while a batch in flight writes "
                    "them"
                )
            self._check_source(chunk, half, info)
            targets = tuple(info.dst_kv_indices[chunk.index_slice].tolist())
            self.said.append((info.endpoint, PageWrite(chunk.room, number, first, targets, half.prompt_ids[:end])))

    def _part_of(self, chunk: Any, half: ServerHalf, info: Any) -> tuple[int, int]:
        """Return the positions that a chunk sends."""
        size = self.run.machine.scheduler.page_size
        first = chunk.index_slice.start * size + (info.decode_prefix_len or 0)
        return first, min(first + len(chunk.prefill_kv_indices) * size, len(half.prompt_ids))

    def _check_source(self, chunk: Any, half: ServerHalf, info: Any) -> None:
        first, end = self._part_of(chunk, half, info)
        before = first // self.run.machine.scheduler.page_size
        table = [0] * before + chunk.prefill_kv_indices.tolist()
        if not self.run.device.holds(half.rid, table, first, end):
            raise Violation(
                f"pages {table[before:]} are sent to {info.endpoint}, but do not hold the KV of the prompt of "
                f"{half.rid} from position {first} to {end - 1}"
            )

    def _end_write(self, number: int) -> None:
        """End a write. Raises Violation if its source has changed, unless nobody needs the write any longer."""
        transfers = self.role.transfers
        chunk = transfers.writing.pop(number, None)
        if chunk is None:
            return
        infos = list(transfers.transfer_infos.get(chunk.room, {}).values())
        if transfers.is_live(chunk.room) and infos:
            self._check_source(chunk, self.halves[chunk.room], infos[0])
        with self.run.machine.inside():
            transfers.end_write(chunk)

    # -- a decode server --

    def _take_pages(self, sender: str, pages: PageWrite) -> None:
        """Take pages. Raises Violation if no request waits for them any longer."""
        role: Decode = self.role
        size = self.run.machine.scheduler.page_size
        waits = [one.req for one in role.receivers() if one.req.bootstrap_room == pages.room]
        table = role.pages_of(waits[0], len(pages.token_ids)) if waits and waits[0].kv.holds_kv else ()
        if table[pages.start // size :] != pages.targets:
            raise Violation(
                f"{sender} writes KV into the pages {list(pages.targets)} for the room {pages.room}, of which "
                f"{self.name} gave {list(table[pages.start // size :])} to a request that waits for them"
            )
        role.loads.append(Load(rid=rid_of(waits[0].rid), start=pages.start, token_ids=pages.token_ids, block_ids=table))
        self.said.append((sender, Written(pages.chunk)))


class SglangFleets(FleetAdapter):
    """Fleets of SGLang's schedulers."""

    name = NAME
    of = SERVER.name
    roles: Mapping[str, str] = {"p": "prefill", "d": "decode"}
    inner_actions = tuple(SERVER.actions)
    space = FleetSpace(NAME, lambda: SERVER.space, left_out=("disaggregation_mode", "client_rids", "router_tells_both"))
    workloads: Mapping[str, str] = {
        "one": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"',
        "again": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14"; 14 begin on=d0 do="start b prompt=14 new=4"',
        "several": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=3"; 2 begin on=d0 do="start b prompt=9 '
        'seed=1"; 3 begin on=d0 do="start c prompt=17 new=4"',
        "pair": 'engines=p0,p1,d0,d1; 1 begin on=d0 do="start a prompt=14 new=3"; 1 begin on=d1 do="start b prompt=11 '
        'new=3"; 3 begin on=d0 do="start c prompt=12 seed=2"; 4 begin on=d1 do="start e prompt=14"',
        "tight": "engines=p0,d0 schedule_conservativeness=0.1 max_total_tokens=32; "
        '1 begin on=d0 do="start a prompt=9 new=12"; 1 begin on=d0 do="start b prompt=8 seed=1 new=12"; '
        '2 begin on=d0 do="start c prompt=3 seed=2 new=10"',
        "normal": "engines=p0,d0 disable_overlap_schedule=True page_size=4; "
        '1 begin on=d0 do="start a prompt=14 new=3"; 2 begin on=d0 do="start b prompt=19 seed=1 new=4"; '
        '3 begin on=d0 do="start c prompt=14 tail=1 shared=8 new=5"',
        "cached": "engines=p0,d0 page_size=4 disaggregation_decode_enable_radix_cache=True; "
        '1 begin on=d0 do="start a prompt=14 new=3"; 9 begin on=d0 do="start b prompt=18 shared=8 tail=1 new=4"; '
        '10 begin on=d0 do="start c prompt=14 new=5"',
        "optimistic": "engines=p0,d0 optimistic_prefill_attempts=1 max_total_tokens=32; "
        '1 begin on=d0 do="start a prompt=14 new=6"; 1 begin on=d0 do="start b prompt=12 seed=1 new=6"; '
        '2 begin on=d0 do="start c prompt=9 seed=2"',
        "deferred": "engines=p0,d0 disaggregation_decode_allocation_policy=prefill_complete; "
        '1 begin on=d0 do="start a prompt=14 new=6"; 2 begin on=d0 do="start b prompt=12 seed=1 new=6"; '
        '3 begin on=d0 do="start c prompt=9 seed=2"',
        "storage": "engines=p0,d0 max_total_tokens=32 enable_hierarchical_cache=True hicache_storage_backend=dynamic "
        "hicache_host_memory_mode=buffer_only hicache_storage_prefetch_policy=wait_complete; "
        '1 begin on=d0 do="start a prompt=14"; 16 at on=p0 do=flush; 17 begin on=d0 do="start b prompt=14 seed=1 '
        'new=10"; 18 begin on=d0 do="start c prompt=14"',
        "paused": 'engines=p0,d0; 1 begin on=d0 do="start a prompt=14 new=9"; '
        '2 begin on=d0 do="start b prompt=17 seed=1 new=4"; 13 at on=d0 do="pause mode=retract"; '
        "16 at on=d0 do=continue",
        "asleep": 'engines=p0,d0 enable_memory_saver=True; 1 begin on=d0 do="start a prompt=14 new=3"; '
        '20 at on=d0 do=sleep; 20 at on=p0 do="sleep part=kv_cache"; 22 at on=d0 do=wake; '
        '22 at on=p0 do="wake part=kv_cache"; 24 begin on=d0 do="start b prompt=14 new=3"',
    }

    @property
    def part_adapter(self) -> str:
        return SGLANG.name

    def config_of(self, config: FleetConfig[SglangSettings], name: str) -> SglangSettings:
        # In a fleet, no name is a prefix of another: the room identifies the request.
        mode = role_in(self.roles, name)
        return msgspec.structs.replace(config.engine, disaggregation_mode=mode, client_rids=False)

    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> SglangMember:
        run = RoutedRun(self.config_of(config, name), self.of, machine.clock, record=record)
        return SglangMember(name, run, [one for one in config.names if one[0] == "p"], machine.made)

    def finale(self, run: FleetRun, turn: int) -> Sequence[FleetEvent]:
        """Return each server's finale, once a pause that keeps a batch has ended."""
        paused = [one for one in run.machine.living if one.run.oracle.paused is not None]
        if turn and paused:
            return [(one.name, Resume(call_id=one.run.new_call_id())) for one in paused]
        return super().finale(run, min(turn, 1)) if turn <= _FLUSHES else ()

    @property
    def mutant_names(self) -> tuple[str, ...]:
        return SERVER.mutant_names

    def write_mutants(self, page: Path, found: Sequence[Found]) -> None:
        """Write the page about the mutants of one server."""
        SERVER.write_mutants(page, found)

    def fleet_digest(self, run: FleetRun) -> bytes:
        del run
        raise UnreadableState("a scheduler of SGLang holds tensors and times")

    def freeze(self, run: FleetRun) -> Frozen[FleetRun]:
        return Frozen(run, COPIER)


ADAPTER: Final = SglangFleets()
