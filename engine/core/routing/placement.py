"""Places requests on replicas: loads, prefixes, the policy over both, and one router's record of them.

A deterministic machine without sockets, threads and clocks, for virtual time too: it takes events and returns choices.
Cache affinity that yields to a bound on imbalance is SGLang's router's. The bound relative to the mean is that of
consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016), by which KubeAI routes.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from itertools import chain as joined
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Final

from engine.core.memory.node import page_keys
from engine.core.messages import salt_key
from engine.core.routing.cache_index import FollowedCache
from engine.core.routing.load import Load

# The order of replicas: weight, pending prefill tokens, free pages (more is better), and the turn of the last choice.
Rank = tuple[int, int, int, int]

# The heap is rebuilt at this many entries per replica: most of them are stale then.
_ENTRIES_A_REPLICA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica's report: counts of requests, tokens still to be prefilled, free pages."""

    running: int = 0
    waiting: int = 0
    pending_prefill_tokens: int = 0
    free_pages: int = 0


@dataclass(eq=False, slots=True)
class _Member:
    capacity: int
    joined_at: int
    # Both count turns, from ``joined_at`` on.
    report_number: int
    turn: int
    accepting: bool = True
    reported: int = 0
    pending: int = 0
    free_pages: int = 0
    own: int = 0
    own_at_report: int = 0
    weight: int = 0
    version: int = 0
    is_counted: bool = False

    @property
    def open(self) -> int:
        """Return the replica's number of requests, at least that of the ones from this router."""
        return max(self.own, self.reported + self.own - self.own_at_report)


class Fleet:
    """Loads by replica. ``total_weight`` and ``available`` count only replicas that can take a request.

    A replica's weight is its number of requests, plus one for each ``tokens_a_request`` tokens that it must still
    prefill. It can take a request while it accepts them and is below its capacity.
    """

    def __init__(self, tokens_a_request: int) -> None:
        self._tokens_a_request = tokens_a_request
        self._members: dict[str, _Member] = {}
        self._heap: list[tuple[Rank, int, str]] = []
        self._turns = 0
        self.total_weight = 0
        self.available = 0

    def join(self, name: str, capacity: int) -> None:
        """Add a replica, idle and accepting; ``capacity`` is the maximum number of requests that it takes at once."""
        if name in self._members:
            raise ValueError(f"a replica must join only once, got {name!r} again; let it leave first")
        self._turns += 1
        self._members[name] = _Member(capacity, self._turns, self._turns, self._turns)
        self._refresh(name)

    def leave(self, name: str) -> None:
        member = self._members.pop(name)
        self._uncount(member)

    def report(self, name: str, load: ReplicaLoad, *, accepting: bool = True) -> None:
        member = self._members[name]
        member.reported = load.running + load.waiting
        member.pending = load.pending_prefill_tokens
        member.free_pages = load.free_pages
        member.own_at_report = member.own
        self._turns += 1
        member.report_number = self._turns
        member.accepting = accepting
        self._refresh(name)

    def sent(self, name: str, tokens: int) -> int:
        """Count a request that was sent, with the tokens that it must prefill. Returns the argument of ``ended``."""
        member = self._members[name]
        self._turns += 1
        member.turn = self._turns
        member.own += 1
        member.pending += tokens
        self._refresh(name)
        return member.report_number

    def ended(self, name: str, tokens: int, report_number: int) -> None:
        """Count the end of a sent request, unless its replica has left since, even if it has joined again."""
        member = self._members.get(name)
        if member is None or report_number < member.joined_at:
            return
        member.own -= 1
        # The report includes the tokens of requests sent before it, unless they were prefilled by then.
        if member.report_number == report_number:
            member.pending -= tokens
        self._refresh(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all replicas, in the order in which they joined."""
        return tuple(self._members)

    def is_known(self, name: str) -> bool:
        return name in self._members

    def can_take(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.is_counted

    def accepts(self, name: str) -> bool:
        return self._members[name].accepting

    def weight(self, name: str) -> int:
        return self._members[name].weight

    def in_flight(self, name: str) -> int:
        """Return the number of unfinished requests that this router has sent there."""
        return self._members[name].own

    def rank(self, name: str) -> Rank:
        """Return the rank of a replica: the smaller is preferred, and no two are equal."""
        member = self._members[name]
        return member.weight, member.pending, -member.free_pages, member.turn

    def least_loaded(self, left_out: Container[str] = ()) -> str | None:
        """Return the replica of the smallest rank that can take a request, or None."""
        put_back = []
        found = None
        while self._heap:
            entry = self._heap[0]
            _, version, name = entry
            member = self._members.get(name)
            if member is None or not member.is_counted or member.version != version:
                heapq.heappop(self._heap)
            elif name in left_out:
                put_back.append(heapq.heappop(self._heap))
            else:
                found = name
                break
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        return found

    def longest_without(self, left_out: Container[str] = ()) -> str | None:
        """Return the replica chosen longest ago that can take a request, or None."""
        open_ones = [name for name, member in self._members.items() if member.is_counted and name not in left_out]
        return min(open_ones, key=lambda name: self._members[name].turn, default=None)

    def _refresh(self, name: str) -> None:
        """Update the sums and the order for one replica."""
        member = self._members[name]
        self._uncount(member)
        # Versions keep growing when a name joins again, so that entries from before it left are stale too.
        self._turns += 1
        member.version = self._turns
        member.weight = member.open + member.pending // self._tokens_a_request
        if not member.accepting or member.open >= member.capacity:
            return
        member.is_counted = True
        self.available += 1
        self.total_weight += member.weight
        heapq.heappush(self._heap, (self.rank(name), member.version, name))
        if len(self._heap) > _ENTRIES_A_REPLICA * max(8, len(self._members)):
            self._rebuild()

    def _uncount(self, member: _Member) -> None:
        if member.is_counted:
            member.is_counted = False
            self.available -= 1
            self.total_weight -= member.weight

    def _rebuild(self) -> None:
        counted = ((name, member) for name, member in self._members.items() if member.is_counted)
        self._heap = [(self.rank(name), member.version, name) for name, member in counted]
        heapq.heapify(self._heap)


class PrefixIndex:
    """The chunks of each replica, at most ``capacity``. Drops the least recently used, from the end of a prefix."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, got {capacity}")
        self._capacity = capacity
        self._chunks: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, list[str]] = {}

    def add(self, replica: str, chain: Sequence[int]) -> None:
        chunks = self._chunks.setdefault(replica, OrderedDict())
        # From the end: the beginning of a prefix is dropped last.
        for chunk in reversed(chain):
            if chunk in chunks:
                chunks.move_to_end(chunk)
            else:
                chunks[chunk] = None
                self._holders.setdefault(chunk, []).append(replica)
        while len(chunks) > self._capacity:
            forgotten, _ = chunks.popitem(last=False)
            self._drop_holder(forgotten, replica)

    def forget(self, replica: str) -> None:
        """Drop every chunk of a replica that was restarted or flushed, or has left."""
        for chunk in self._chunks.pop(replica, ()):
            self._drop_holder(chunk, replica)

    def longest_first(self, chain: Sequence[int]) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield the prefixes of a prompt that replicas hold, longest first: number of chunks, and holders."""
        for length in range(len(chain), 0, -1):
            holders = self._holders.get(chain[length - 1])
            if holders:
                yield length, holders

    def size(self, replica: str) -> int:
        return len(self._chunks.get(replica, ()))

    def _drop_holder(self, chunk: int, replica: str) -> None:
        holders = self._holders[chunk]
        holders.remove(replica)
        if not holders:
            del self._holders[chunk]


# Later chunks are not hashed: a common prefix of this length settles the choice anyway.
MAX_CHUNKS: Final = 512
_HASH_BYTES: Final = 8


def chunk_hashes(prompt: bytes, chunk_bytes: int, namespace: bytes = b"") -> tuple[int, ...]:
    """Return the chain of a prompt, without a partial last chunk.

    Prompts of different namespaces (a model, a LoRA) share no prefix.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    before = blake2b(namespace, digest_size=_HASH_BYTES).digest()
    chain: list[int] = []
    for end in range(chunk_bytes, min(len(prompt), MAX_CHUNKS * chunk_bytes) + 1, chunk_bytes):
        before = blake2b(before + prompt[end - chunk_bytes : end], digest_size=_HASH_BYTES).digest()
        chain.append(int.from_bytes(before, "big"))
    return tuple(chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the policy.

    A replica gets the requests of its prefixes while its weight is at most ``balance_percent`` of the mean, or at most
    ``balance_slack`` above the mean, whichever is more. At most ``holders_seen`` holders of a prefix are compared.
    Without ``by_prefix`` replicas take turns, regardless of caches and loads.
    """

    balance_percent: int = 125
    balance_slack: int = 4
    tokens_a_request: int = 2048
    holders_seen: int = 32
    by_prefix: bool = True

    def __post_init__(self) -> None:
        least = {"balance_percent": 100, "balance_slack": 0, "tokens_a_request": 1, "holders_seen": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}; raise it")

    def heaviest(self, fleet: Fleet) -> int:
        """Return the maximum weight at which a replica is chosen for its chunks."""
        mean = fleet.total_weight // fleet.available
        return max(fleet.total_weight * self.balance_percent // (100 * fleet.available), mean + self.balance_slack)


class Refused(Enum):
    """The reasons why no replica takes a request."""

    FULL = "every replica that accepts requests is full"
    NONE = "no replica accepts requests"


def choose(
    chain: Sequence[int],
    fleet: Fleet,
    index: PrefixIndex,
    rules: Rules,
    *,
    held: Mapping[str, int] | None = None,
    left_out: Collection[str] = (),
    seed: int = 0,
) -> tuple[str, int] | Refused:
    """Return the replica for a prompt with these chunk hashes, and the number of chunks that it probably holds.

    Equal inputs give equal choices. Changes nothing.

    ``held`` are the chunks that replicas report; ``index`` has the chunks of the others.

    A replica that is draining, unhealthy, full or ``left_out`` is never chosen. Among equal holders the smaller rank
    wins: weight, pending tokens, free pages, longest without a request. If every holder is too heavy, the least loaded
    replica takes the request.
    """
    if fleet.available and not rules.by_prefix:
        next_one = fleet.longest_without(left_out)
        if next_one is not None:
            return next_one, 0
    elif fleet.available:
        heaviest = rules.heaviest(fleet)
        for length, holders in _longest_first(chain, index, held or {}):
            seen = _seen(holders, rules.holders_seen, (chain[-1] if chain else 0) ^ seed)
            fit = [
                name
                for name in seen
                if name not in left_out and fleet.can_take(name) and fleet.weight(name) <= heaviest
            ]
            if fit:
                return min(fit, key=fleet.rank), length
        least = fleet.least_loaded(left_out)
        if least is not None:
            return least, 0
    accepting = any(fleet.accepts(name) for name in fleet.names if name not in left_out)
    return Refused.FULL if accepting else Refused.NONE


def _longest_first(
    chain: Sequence[int], index: PrefixIndex, held: Mapping[str, int]
) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the prefixes that replicas hold, longest first, by the index and by the replicas' reports."""
    reported = sorted(((length, (name,)) for name, length in held.items() if length), reverse=True)
    if not reported:
        yield from index.longest_first(chain)
        return
    both = heapq.merge(reported, index.longest_first(chain), key=itemgetter(0), reverse=True)
    for length, found in groupby(both, key=itemgetter(0)):
        yield length, [name for _, names in found for name in names]


def _seen(holders: Sequence[str], most: int, draw: int) -> Sequence[str]:
    """Return at most ``most`` holders of a prefix, from a random offset: no holder is always first."""
    if len(holders) <= most:
        return holders
    start = draw % len(holders)
    end = start + most
    return tuple(joined(holders[start:end], holders[: max(0, end - len(holders))]))


# Later pages are not looked up: a common prefix of this length settles the choice anyway.
MAX_PAGES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as a router knows it: the ``chain`` of its chunks, and an estimate of its ``tokens``.

    With a tokenizer it has token ids, LoRA and the key of its cache salt, and a chunk is a page.
    """

    chain: Sequence[int] = ()
    tokens: int = 0
    tokens_a_chunk: int = 1
    ids: tuple[int, ...] = ()
    lora: str = ""
    salt: int = 0

    @classmethod
    def of_ids(cls, ids: tuple[int, ...], page_size: int, *, lora: str = "", salt: int = 0) -> Prompt:
        """Return a prompt with known ids. Each engine numbers its own LoRAs, so the chain has the LoRA's name."""
        ids = ids[: MAX_PAGES * page_size]
        namespace = -1 - (salt_key(lora) >> 1) if lora else 0
        chain = tuple(map(int.from_bytes, page_keys(ids, page_size, (namespace, salt))))
        return cls(chain=chain, tokens=len(ids), tokens_a_chunk=page_size, ids=ids, lora=lora, salt=salt)


NO_PROMPT: Final = Prompt()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A placed request, returned at its end. ``flying`` are the chunks counted for it."""

    replica: str
    held_chunks: int
    tokens: int
    report_number: int
    flying: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Followed:
    """An engine that publishes KV events. ``flying`` counts the chunks that its live requests will add."""

    cache: FollowedCache
    flying: Counter[int]


class Placement:
    """Places requests. ``index_chunks`` bounds the index of an engine without KV events."""

    def __init__(self, rules: Rules, *, index_chunks: int, seed: int = 0) -> None:
        self._rules = rules
        self._seed = seed
        self.fleet = Fleet(rules.tokens_a_request)
        self.index = PrefixIndex(index_chunks)
        self._followed: dict[str, _Followed] = {}
        # The cached pages in the last load report, and the version of their weights.
        self._cached: dict[str, tuple[int, int]] = {}

    def join(self, name: str, capacity: int, cache: FollowedCache | None = None) -> None:
        """Add an engine that takes requests, with an empty cache or with its KV events."""
        self.fleet.join(name, capacity)
        if cache is not None:
            self.follow(name, cache)

    def follow(self, name: str, cache: FollowedCache) -> None:
        """Place by an engine's KV events from now on, for prompts of known ids."""
        self._followed[name] = _Followed(cache, Counter())

    def leave(self, name: str) -> None:
        """Remove an engine, its load and its prefixes."""
        self.fleet.leave(name)
        self.index.forget(name)
        self._followed.pop(name, None)
        self._cached.pop(name, None)

    def lost(self, name: str) -> None:
        """Place nothing there until its next report; the known cache may be from before a restart."""
        self.fleet.report(name, ReplicaLoad(), accepting=False)
        self.index.forget(name)
        if name in self._followed:
            self._followed[name].cache.doubt()

    def report(self, name: str, load: ReplicaLoad, *, accepting: bool = True, is_flushed: bool = False) -> None:
        """Take an engine's report. With ``is_flushed`` its cache is empty."""
        self.fleet.report(name, load, accepting=accepting)
        if is_flushed:
            self.index.forget(name)

    def take_load(self, name: str, load: Load) -> None:
        """Take the load of an engine that takes requests; it may show that the cache was dropped."""
        pages, version = cached = load.cached_pages, load.weights_version
        pages_before, version_before = self._cached.get(name, cached)
        self._cached[name] = cached
        reported = ReplicaLoad(
            running=load.num_running_reqs,
            waiting=load.num_waiting_reqs,
            pending_prefill_tokens=load.num_pending_tokens,
            free_pages=load.free_pages,
        )
        self.report(name, reported, is_flushed=version != version_before or (pages_before > 0 and pages == 0))

    def place(self, prompt: Prompt, left_out: Collection[str] = ()) -> Ticket | Refused:
        """Choose an engine for a prompt, and count the request as sent there."""
        caches = self._followed if prompt.ids else {}
        held = {name: self._held(followed, prompt) for name, followed in caches.items()}
        choice = choose(
            prompt.chain, self.fleet, self.index, self._rules, held=held, left_out=left_out, seed=self._seed
        )
        if isinstance(choice, Refused):
            return choice
        replica, held_chunks = choice
        to_compute = max(0, prompt.tokens - held_chunks * prompt.tokens_a_chunk)
        report_number = self.fleet.sent(replica, to_compute)
        followed = caches.get(replica)
        if followed is None:
            self.index.add(replica, prompt.chain)
        else:
            followed.flying.update(prompt.chain)
        return Ticket(replica, held_chunks, to_compute, report_number, () if followed is None else prompt.chain)

    def ended(self, ticket: Ticket) -> None:
        """Count the end of a request, however it ended."""
        self.fleet.ended(ticket.replica, ticket.tokens, ticket.report_number)
        followed = self._followed.get(ticket.replica)
        if followed is None:
            return
        for chunk in ticket.flying:
            followed.flying[chunk] -= 1
            if followed.flying[chunk] <= 0:
                del followed.flying[chunk]

    def _held(self, followed: _Followed, prompt: Prompt) -> int:
        """Return the number of chunks of a prompt that an engine has by its events, or will have from its live
        requests.
        """
        cached = followed.cache.cached_pages(prompt.ids, prompt.lora, prompt.salt)
        return max(cached, len([*takewhile(followed.flying.__contains__, prompt.chain)]))
