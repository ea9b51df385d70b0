"""Stands in for a device's streams and events, and for threads; the machine decides when their work ends.

A stream carries page transfers in order. A transfer is copied when it ends, or when a batch waits for it; until then
its source may change. An event ends with all transfers that its stream had begun when the event was recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, Final

# Pairs of pages, each copied from the first to the second.
Pages = tuple[tuple[int, int], ...]


class Stream:
    """A stream of transfers, counted by ``begun``, ``made`` and ``over``; it waited for ``waited_for`` batches.

    ``copies`` has the pairs copied since they were last taken, ``fresh`` the transfers begun.
    """

    # Over all streams in order, within a step of one machine; ``batches`` counts the launches before it.
    copies: ClassVar[list[tuple[int, int]]] = []
    fresh: ClassVar[list[tuple[Stream, Pages]]] = []
    batches: ClassVar[int] = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.begun = self.made = self.over = 0
        self.waited_for = 0
        self._waiting: deque[Pages] = deque()

    def begin(self, pages: Pages) -> None:
        self.begun += 1
        self._waiting.append(pages)
        self.fresh.append((self, pages))

    def make(self, last: int) -> None:
        """Copy the transfers up to this one, before their end is known."""
        while self.made < last:
            self.made += 1
            self.copies.extend(self._waiting.popleft())

    def end(self, last: int) -> None:
        self.make(last)
        self.over = max(self.over, last)

    @property
    def is_quiet(self) -> bool:
        return self.over == self.begun

    # -- what SGLang calls --

    def wait_stream(self, other: Any) -> None:
        """Wait for the only other stream, which computes the batches."""
        del other
        self.waited_for = self.batches

    def wait_event(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        self.end(self.begun)


class Event:
    def __init__(self, **_: Any) -> None:
        self._stream: Stream | None = None
        self.last = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _streams[-1]
        self.last = self._stream.begun

    def query(self) -> bool:
        return self._stream is None or self._stream.over >= self.last

    def wait(self, stream: Stream | None = None) -> None:
        """Make the stream's later work depend on the event's results."""
        del stream
        if self._stream is not None:
            self._stream.make(self.last)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.end(self.last)


# Entered streams; the first computes the batches.
_streams: Final = [Stream()]


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def current_stream() -> Stream:
    return _streams[-1]


DEVICE: Final = SimpleNamespace(Event=Event, Stream=Stream, stream=_on, current_stream=current_stream)


class Flag:
    """Stands in for ``threading.Event``; nothing waits for it."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False


class Thread:
    """Stands in for ``threading.Thread``; its body runs on request."""

    def __init__(self, target: Any = None, **_: Any) -> None:
        self.target = target

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False

    def run_until_it_waits(self) -> None:
        try:
            self.target()
        except Waits:
            return


class Waits(Exception):
    """A thread would wait."""


class Queue:
    """Stands in for ``queue.Queue``; a thread's body ends where it would wait."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.queue = deque(items)

    def __class_getitem__(cls, kind: Any) -> type[Queue]:
        del kind
        return cls

    def put(self, item: Any) -> None:
        self.queue.append(item)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        del block, timeout
        if not self.queue:
            raise Waits
        return self.queue.popleft()

    def empty(self) -> bool:
        return not self.queue

    def qsize(self) -> int:
        return len(self.queue)


STILL: Final = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0, perf_counter=lambda: 0.0, sleep=lambda _: None)
THREADS: Final = SimpleNamespace(Thread=Thread, Lock=nullcontext, RLock=nullcontext, Event=Flag, local=SimpleNamespace)
