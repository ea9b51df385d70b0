"""SGLang's own KV manager for the Mooncake backend, with links in place of its sockets, its RDMA and its threads.

The bodies of its threads run when a message arrives and when a chunk's write ends. Nothing waits, and no time passes:
losing the other engine takes the place of time limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

import msgspec
import torch
from sglang.srt.disaggregation import decode, mooncake, prefill
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import bootstrap
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, PrefillServerInfo
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed import bootstrap as groups

from scripted_sglang.streams import STILL, THREADS

PORT: Final = 1
_ROW: Final = ("output_ids", "cached_tokens", "bootstrap_room")


# -- messages between managers --


class Frames(msgspec.Struct, frozen=True):
    """One of SGLang's messages, as its sockets carry it."""

    parts: tuple[bytes, ...]


class PageWrite(msgspec.Struct, frozen=True):
    """The KV of part of a prompt, starting at ``start``, written into the other engine's pages ``targets``."""

    is_bulk: ClassVar[bool] = True

    room: int
    chunk: int
    start: int
    targets: tuple[int, ...]
    token_ids: tuple[int, ...]


class Written(msgspec.Struct, frozen=True):
    """The end of a chunk's write."""

    chunk: int


class BufferRow(msgspec.Struct, frozen=True):
    """The values that the last chunk writes into a row of the other engine's buffers."""

    index: int
    values: Mapping[str, tuple[int, ...]]


class Recompute(msgspec.Struct, frozen=True):
    """A request whose KV was dropped: ``/generate`` at the prefill engine."""

    room: int
    prompt_ids: tuple[int, ...]
    priority: int


# -- stand-ins for streams and queues --


class Launched:
    """Stands in for a stream's event: the launches before it was recorded. ``batches`` counts all launches."""

    batches: ClassVar[int] = 0

    def __init__(self) -> None:
        self.last = 0

    def record(self, stream: Any = None) -> None:
        del stream
        self.last = type(self).batches

    def synchronize(self) -> None: ...


class Chunks:
    """Stands in for a queue that a thread waits on."""

    def __init__(self, *chunks: Any) -> None:
        self.waiting = deque(chunks)

    def put(self, chunk: Any) -> None:
        self.waiting.append(chunk)

    def get(self) -> Any:
        """Return the next chunk; None ends the thread's body."""
        return self.waiting.popleft() if self.waiting else None


class _Registry:
    """Stands in for the transfer engine, with which servers register their memory."""

    def batch_register(self, pointers: list[int], lengths: list[int]) -> None: ...

    def batch_deregister(self, pointers: list[int]) -> None: ...


class _Wire:
    """Stands in for a socket to another engine."""

    def __init__(self, manager: LinkedManager, name: str) -> None:
        self._manager = manager
        self._name = name

    def send_multipart(self, parts: list[bytes]) -> None:
        self._manager.said.append((self._name, Frames(tuple(parts))))


# -- the classes of a transfer backend --


class LinkedManager(conn.MooncakeKVManager):
    """SGLang's manager over links. ``said`` has messages by engine, ``writing`` the pending chunks by number."""

    _zmq_ctx: Any
    server_socket: Any
    executors: list[Any]
    _worker_threads: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._zmq_ctx.destroy(linger=0)
        self._zmq_ctx = self.server_socket = None
        self.executors = []
        self.queue = Chunks()
        self.transfer_queues = [self.queue]
        self._worker_threads = []
        self.inbox: deque[tuple[bytes, ...]] = deque()
        self.said: list[tuple[str, Any]] = []
        self.writing: dict[int, Any] = {}
        self.begun = 0
        # The reachable engines, and the number of engines made under each name.
        self.reached: set[str] = set()
        self.born = 0
        # Sessions of lost decode engines, until they register again.
        self.lost: set[str] = set()
        # Rooms whose decode engine was lost; a pause may keep their requests from bootstrapping until later.
        self.forsaken: set[int] = set()

    def init_engine(self) -> None:
        self.engine = _Registry()

    def register_to_bootstrap(self) -> None: ...

    def _start_heartbeat_checker_thread(self) -> None: ...

    def get_session_id(self) -> str:
        return f"{self.local_ip}/{self.born}:{PORT}"

    # -- messages --

    def take_messages(self) -> None:
        """Run the listening thread on all pending messages."""
        if not self.inbox:
            return
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        (self.start_prefill_thread if is_prefill else self.start_decode_thread)()
        body = self._worker_threads[0].target
        self._worker_threads = []
        self._stopped = False
        body()

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 0) -> Any:
        del socket, timeout_ms

        def recv() -> list[bytes] | None:
            parts = list(self.inbox.popleft()) if self.inbox else None
            self._stopped = not self.inbox
            return None if parts and self._handle_bootstrap_message(parts) else parts

        return recv

    def _send_multipart_locked(self, endpoint: str, parts: list[bytes], is_ipv6: bool = False) -> None:
        del is_ipv6
        self.said.append((endpoint.removeprefix("tcp://").rpartition(":")[0], Frames(tuple(parts))))

    @property
    def is_quiet(self) -> bool:
        """Whether no message and no write is pending."""
        return not (self.inbox or self.queue.waiting or self.writing)

    @property
    def rooms_to_write(self) -> set[int]:
        """Return the rooms of pending chunks."""
        return {chunk.room for chunk in (*self.queue.waiting, *self.writing.values())}

    # -- a decode engine --

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Take the info from a prefill engine's bootstrap server; return False if it cannot be reached."""
        if name_of(bootstrap_addr) not in self.reached:
            return False
        if bootstrap_addr not in self.prefill_info_table:
            info = PrefillServerInfo(1, 1, 1, 1, self.kv_args.page_size, self.kv_cache_dtype_str, True)
            info.decode_allocation_policy = "prefill_complete" if self.defer_decode_allocation else "early"
            info.target_tp_rank, info.target_tp_ranks = 0, [0]
            info.target_cp_ranks, info.target_pp_ranks = [0], [0]
            info.required_dst_info_num = info.required_prefill_response_num = 1
            self.prefill_info_table[bootstrap_addr] = info
        return True

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        name, room = name_of(kv_receiver.bootstrap_addr), payload["bootstrap_room"]
        if name not in self.reached:
            self._fail_prefill_recompute(kv_receiver, "the prefill engine cannot be reached")
            return
        self.said.append((name, Recompute(room, tuple(payload["input_ids"]), payload["priority"] or 0)))

    def lose_prefill(self, name: str) -> None:
        """Handle the loss of a prefill engine as the heartbeat does."""
        for address in {*self.prefill_info_table, *self.addr_to_rooms_tracker}:
            if name_of(address) == name:
                self._handle_node_failure(address)

    # -- a prefill engine --

    def begin_writes(self, done: int) -> list[tuple[int, Any, Any]]:
        """Begin writing chunks; return their numbers and receivers. The first ``done`` batches are computed.

        As SGLang's thread does, take chunks in order, count them, and skip those of failed rooms.
        """
        begun = []
        while self.queue.waiting and not self.writing:
            chunk = self.queue.waiting[0]
            if chunk.wait_event is not None and chunk.wait_event.last > done and self.is_live(chunk.room):
                break
            self.queue.waiting.popleft()
            chunk.wait_event = None
            self._staging_outstanding[chunk.room] += 1
            chunk.staging_counted = True
            infos = list(self.transfer_infos.get(chunk.room, {}).values())
            if not self.is_live(chunk.room) or not infos or not self._is_written(chunk, infos[0]):
                self.end_write(chunk)
                continue
            self.begun += 1
            self.writing[self.begun] = chunk
            begun.append((self.begun, chunk, infos[0]))
        return begun

    def is_live(self, room: int) -> bool:
        """Whether a room has not failed and its sender is there."""
        status: int = self.request_status.get(room, KVPoll.Failed)
        return status != int(KVPoll.Failed)

    def _is_written(self, chunk: Any, info: Any) -> bool:
        return len(chunk.prefill_kv_indices) > 0 and info.mooncake_session_id not in self.lost | self.failed_sessions

    def end_write(self, chunk: Any) -> None:
        """Run the writing thread on a chunk whose write has ended or was empty."""
        self.transfer_worker(Chunks(chunk), None)

    def _publish_peer_registration(self, mooncake_session_id: str, decode_kv_args: Any) -> str | None:
        self.lost.discard(mooncake_session_id)
        mismatch: str | None = super()._publish_peer_registration(mooncake_session_id, decode_kv_args)
        return mismatch

    def send_kvcache(self, mooncake_session_id: str, *_: Any, **__: Any) -> int:
        return -1 if mooncake_session_id in self.lost else 0

    def send_aux(self, req: Any, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        del dst_aux_ptrs
        if req.mooncake_session_id in self.lost:
            return -1
        values = {name: tuple(getattr(self.buffers, name)[prefill_aux_index].tolist()) for name in _ROW}
        self.said.append((req.endpoint, BufferRow(req.dst_aux_index, values)))
        return 0

    def lose_decode(self, name: str, rooms: list[int]) -> None:
        """Fail the writes to a lost engine, and let the time limit pass of the requests that wait for it."""
        self.lost |= {session for session in self.decode_kv_args_table if session.partition("/")[0] == name}
        lost = [number for number, chunk in self.writing.items() if self._goes_to(chunk.room, name)]
        for number in lost:
            self.end_write(self.writing.pop(number))
        self.forsaken.update(rooms)

    def _goes_to(self, room: int, name: str) -> bool:
        return any(info.endpoint == name for info in self.transfer_infos.get(room, {}).values())

    # -- for tests --

    @property
    def buffers(self) -> Any:
        """The rows that last chunks write."""
        return self.scheduler.disagg_metadata_buffers

    def write_row(self, row: BufferRow) -> None:
        for name, values in row.values.items():
            into = getattr(self.buffers, name)[row.index]
            into.copy_(torch.tensor(values, dtype=into.dtype))


class LinkedSender(conn.MooncakeKVSender):
    supports_host_tensor_indices = False

    def _check_bootstrap_timeout(self) -> KVPoll | None:
        """Return a failure if nothing will come for this room: its time limit would pass."""
        if self.bootstrap_room not in self.kv_mgr.forsaken:
            return None
        self.kv_mgr.record_failure(self.bootstrap_room, "timed out")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        return KVPoll.Failed


class LinkedReceiver(conn.MooncakeKVReceiver):
    def _get_bootstrap_info_from_server(self, *_: Any) -> dict[str, Any]:
        return {"rank_ip": name_of(self.bootstrap_addr), "rank_port": PORT, "pp_rank": 0}

    def _connect_to_bootstrap_server(
        self, bootstrap_info: dict[str, Any]
    ) -> tuple[_Wire, AbstractContextManager[None]]:
        return _Wire(self.kv_mgr, bootstrap_info["rank_ip"]), nullcontext()


def name_of(address: str) -> str:
    """Return the engine at this address."""
    return address.rpartition(":")[0]


def room_that_fails(parts: tuple[bytes, ...], manager: LinkedManager) -> int | None:
    """Return the room that one of SGLang's messages reports as failed or aborted."""
    if manager.disaggregation_mode == DisaggregationMode.PREFILL:
        aborted = AbortNotification.from_zmq(list(parts)) if parts[0] == ABORT_TAG else None
        return None if aborted is None else aborted.room
    parsed = None if len(parts) != 3 or not parts[0].isdigit() else manager.parse_kv_status_message(list(parts))
    return parsed[0] if parsed is not None and parsed[1] == KVPoll.Failed else None


def install() -> None:
    """Install these classes, which neither wait nor read the time, in SGLang's schedulers of this process."""
    mooncake.MooncakeKVManager, mooncake.MooncakeKVSender = LinkedManager, LinkedSender
    mooncake.MooncakeKVReceiver = LinkedReceiver
    conn.threading = common.threading = bootstrap.threading = THREADS
    conn.time = common.time = bootstrap.time = decode.time = prefill.time = STILL
    groups.maybe_init_shared_mooncake_transfer_engine = lambda **_: None
    torch.cuda.Event = Launched  # type: ignore[misc, assignment]
    # As at the creation of the class.
    conn.CommonKVReceiver._global_lock = nullcontext()  # noqa: SLF001 - as above
