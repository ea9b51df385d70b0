"""SGLang's own host tier and storage on the CPU; the machine copies pages between device, host and storage.

Replaced are the device's streams and events, the copy kernels, the registration of host memory, and threads with their
queues. SGLang decides which pages are cached in which tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hicache_storage, l2_transfer, unified_radix_cache, utils
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from scripted.sdk import Batch, BatchResult, Signal, Violation
from scripted_sglang.actions import FAIL, FORGET, HOLD, RELEASE, TIERS
from scripted_sglang.streams import DEVICE, THREADS, Pages, Queue, Stream, current_stream

# Block numbers outside the device: the host's from here on, the storage's below 0, which a flush does not empty.
HOST: Final = 10_000
_HOST, _STORAGE = TIERS


def pages_of(slots: torch.Tensor, size: int) -> list[int]:
    """Return the pages of these slots. Raises Violation for slots that are no whole pages."""
    there = slots.tolist()
    pages = [slot // size for slot in there[::size]]
    if there != [page * size + place for page in pages for place in range(size)]:
        raise Violation(f"the slots {there} copied between tiers are not whole pages of {size}")
    return pages


class Storage(hicache_storage.HiCacheStorage):
    """A storage backend that loses pages only on command.

    ``numbers`` has the block of each stored page by key. With ``failing``, the next read returns only this many pages.
    """

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        del config, kwargs
        self.numbers: dict[str, int] = {}
        self.stored = 0
        self.failing: int | None = None

    def forget(self) -> None:
        self.numbers = {}

    def exists(self, key: str) -> bool:
        return key in self.numbers

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        del extra_info
        for key, page in zip(keys, self._pages(host_indices), strict=True):
            self.stored += 1
            self.numbers[key] = -self.stored
            Stream.copies.append((page, -self.stored))
        return [True] * len(keys)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        del extra_info
        most, self.failing = len(keys) if self.failing is None else self.failing, None
        come = [place < most and key in self.numbers for place, key in enumerate(keys)]
        for key, page, comes in zip(keys, self._pages(host_indices), come, strict=True):
            if comes:
                Stream.copies.append((self.numbers[key], page))
        return come

    def _pages(self, host_indices: torch.Tensor) -> list[int]:
        return [HOST + page for page in pages_of(host_indices, self.mem_pool_host.page_size)]

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("pages are read and written together")

    get = set = batch_get = batch_set = _unused


class NoHost:
    """The host tier of a scheduler without one: copies nothing."""

    is_known = True

    @property
    def holds(self) -> bool:
        """Whether transfers are held."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether a transfer will end in the next step."""
        return False

    @property
    def is_quiet(self) -> bool:
        """Whether no transfer is pending, known to the scheduler or not."""
        return True

    @property
    def prefetched(self) -> int:
        """How many requests have a prefetch that the scheduler has not ended."""
        return 0

    def begin(self, launched: int, events: Iterable[Any]) -> None:
        """Begin a step after this many launched batches."""

    def launch(self, batch: Any, number: int) -> None:
        """Compute a batch after the loads that it waits for."""

    def end(self, in_flight: Iterable[Batch]) -> Pages:
        """Return the pages copied in this step."""
        del in_flight
        return ()


class HostTier(NoHost):
    """The host tier of a scheduler's ``tree_cache``.

    Copies from one step end in the next unless they are held; the storage threads run as far as they can in each step.
    A batch waits for its loads, so they have ended by the time its result is there.
    """

    def __init__(self, tree_cache: Any) -> None:
        self._cache = tree_cache
        controller = self._controller = tree_cache.cache_controller
        self._to_host: Stream = controller.l2_transfer_engine.device_to_host_stream
        self._to_device: Stream = controller.l2_transfer_engine.host_to_device_stream
        self._held: set[str] = set()
        # Whether the end of each copy in this step was known beforehand.
        self.is_known = True
        # The last transfer that each batch in flight waited for.
        self._waited_for: dict[int, int] = {}
        pool = self._pool = controller.mem_pool_host.anchor_entry.host_pool
        # It holds no KV.
        pool.kv_buffer = None
        pool.k_data_refs = pool.v_data_refs = pool.host_kv_data_refs = []
        pool.device_k_buffers = pool.device_v_buffers = pool._buffer_infos = ()  # noqa: SLF001 - SGLang's own place

    @property
    def holds(self) -> bool:
        return bool(self._held)

    @property
    def goes_on(self) -> bool:
        is_carried = not (self._to_host.is_quiet and self._to_device.is_quiet)
        return (is_carried and _HOST not in self._held) or (self._is_stored and _STORAGE not in self._held)

    @property
    def is_quiet(self) -> bool:
        return self._to_host.is_quiet and self._to_device.is_quiet and not self._is_stored

    @property
    def prefetched(self) -> int:
        return len(self._cache.ongoing_prefetch) if self._cache.enable_storage else 0

    @property
    def _is_stored(self) -> bool:
        return any(not queue.empty() for _, queue in self._threads())

    def _threads(self) -> list[tuple[Any, Queue]]:
        """Return the storage threads, each with the queue that it waits on."""
        one = self._controller
        if not one.enable_storage:
            return []
        return [
            (one.backup_thread, one.backup_queue),
            (one.prefetch_thread, one.prefetch_queue),
            (one.prefetch_io_aux_thread, one.prefetch_buffer),
            (one.prefetch_sync_thread, one.prefetch_sync_queue),
        ]

    def begin(self, launched: int, events: Iterable[Any]) -> None:
        Stream.copies.clear()
        Stream.fresh.clear()
        Stream.batches = launched
        self.is_known = self.is_quiet
        for event in events:
            if isinstance(event, Signal):
                self._take(event)
            elif isinstance(event, BatchResult):
                self._to_device.end(self._waited_for.pop(event.batch_id))
        if _HOST not in self._held:
            self._to_host.end(self._to_host.begun)
            self._to_device.end(self._to_device.begun)
        if _STORAGE not in self._held:
            for thread, _ in self._threads():
                thread.run_until_it_waits()

    def _take(self, signal: Signal) -> None:
        storage = self._controller.storage_backend
        if signal.name == HOLD:
            self._held.add(TIERS[signal.value])
        elif signal.name == RELEASE:
            self._held.clear()
        elif signal.name == FAIL and storage is not None:
            storage.failing = signal.value
        elif signal.name == FORGET and storage is not None:
            storage.forget()

    def launch(self, batch: Any, number: int) -> None:
        """Wait before each layer until it is loaded, as SGLang's worker does."""
        counter = self._controller.layer_done_counter
        counter.set_consumer(batch.hicache_consumer_index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        self._waited_for[number] = self._to_device.made

    def end(self, in_flight: Iterable[Batch]) -> Pages:
        """Return the copied pages. Raises Violation for a copy that overtakes a writer, and for lost slots."""
        size = self._pool.page_size
        written = {one.id: one for one in in_flight}
        for stream, pages in Stream.fresh:
            touched = {page for pair in pages for page in pair if page < HOST}
            for number in range(stream.waited_for + 1, Stream.batches + 1):
                shares = written[number].shares if number in written else ()
                both = touched.intersection(page for share in shares for page in written_by(share, size))
                if both:
                    raise Violation(f"pages {sorted(both)} are copied while batch {number} writes them")
        self._check_nothing_is_lost()
        return tuple(Stream.copies)

    def _check_nothing_is_lost(self) -> None:
        """Raise Violation for host slots without an owner."""
        cache, controller = self._cache, self._controller
        if not self.is_quiet or cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup:
            return
        if cache.buffer_pipeline is not None and not cache.buffer_pipeline.is_idle():
            return
        waiting = (controller.host_mem_release_queue, controller.ack_prefetch_queue, controller.prefetch_hit_queue)
        if cache.ongoing_prefetch or any(queue for queue in waiting if queue is not None and not queue.empty()):
            return
        nodes = cache.tree_core._collect_all_nodes()  # noqa: SLF001 - not public
        values = [data.host_value for node in nodes for data in node.component_data if data is not None]
        kept = sum(len(value) for value in values if value is not None)
        used = self._pool.logical_size - self._pool.available_size()
        if used != kept:
            raise Violation(f"{used} tokens of the host are in use, but its tree holds {kept}")


def written_by(share: Any, size: int) -> Sequence[int]:
    """Return the pages that a share writes."""
    pages: Sequence[int] = share.block_ids[share.start // size : (share.start + share.count - 1) // size + 1]
    return pages


def _carry(sources: Iterable[int], targets: Iterable[int]) -> None:
    current_stream().begin(tuple(zip(sources, targets, strict=True)))


def _to_host(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Stand in for the kernel that copies all layers of these slots to the host."""
    del device_pool, io_backend
    size = pool.page_size
    _carry(pages_of(device_indices, size), [HOST + page for page in pages_of(host_indices, size)])


def _to_device(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    **_: Any,
) -> None:
    """Stand in for the kernel that copies one layer back; the model has one."""
    assert layer_id == 0, f"the model has one layer, but layer {layer_id} is loaded"
    del device_pool, io_backend
    size = pool.page_size
    _carry([HOST + page for page in pages_of(host_indices, size)], pages_of(device_indices, size))


def _hashes(token_ids: Any, prior: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Stand in for a C++ extension that compiles on its first call: hash all tokens, or each page's prefix."""
    raw, count, *_ = native_hash._native_hash_input(token_ids)  # noqa: SLF001 - SGLang's own input
    hashes, digest = [], prior or b""
    for start in range(0, count, page_size or max(1, count)):
        page = raw[start : min(count, start + (page_size or count))]
        digest = hashlib.sha256(digest + page.tobytes()).digest()
        hashes.append(digest.hex())
    return hashes if page_size else hashes[0]


def install() -> None:
    """Install these stand-ins, which never wait, in this process's host tiers."""
    cache_controller.device_module = l2_transfer.device_module = DEVICE
    cache_controller.Queue = hybrid_cache_controller.Queue = Queue
    for module in (cache_controller, hybrid_cache_controller, unified_radix_cache, base, hicache_storage):
        module.threading = THREADS
    utils.get_native_hash = _hashes
    # The handler would keep a cache alive until the process ends.
    unified_radix_cache.atexit = SimpleNamespace(register=lambda _: None)
    common._cuda_host_register = lambda *_: None  # noqa: SLF001 - registers memory
    MHATokenToKVPoolHost.backup_from_device_all_layer = _to_host
    MHATokenToKVPoolHost.load_to_device_per_layer = _to_device
