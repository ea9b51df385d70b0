"""One router's memory: its engines, what each has cached, and the requests that it has sent and not seen end.

A machine without sockets, threads and clocks: what happened goes in, choices come out. Owns the order of the updates,
so that the next choice knows of this one. Sends nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from engine.memory.node import page_keys
from engine.messages import salt_key
from engine.routing.fleet import Fleet, ReplicaLoad
from engine.routing.index import PrefixIndex
from engine.routing.picture import FollowedCache
from engine.routing.policy import Choice, Refused, Rules, choose

# Later pages are not looked for: a common prefix of this length decides the choice anyway.
MAX_PAGES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a router knows of a prompt: the ``chain`` of its chunks, and about how many ``tokens`` it has.

    Its token ids, its LoRA and the key of its cache salt are there where a tokenizer is: then a chunk is a page.
    """

    chain: Sequence[int] = ()
    tokens: int = 0
    tokens_a_chunk: int = 1
    ids: tuple[int, ...] = ()
    lora: str = ""
    salt: int = 0

    @classmethod
    def of_ids(cls, ids: tuple[int, ...], page_size: int, *, lora: str = "", salt: int = 0) -> Prompt:
        """A prompt whose ids are known. Each engine numbers its LoRAs, so a LoRA's own name stands in the chain."""
        ids = ids[: MAX_PAGES * page_size]
        namespace = -1 - (salt_key(lora) >> 1) if lora else 0
        chain = tuple(map(int.from_bytes, page_keys(ids, page_size, (namespace, salt))))
        return cls(chain=chain, tokens=len(ids), tokens_a_chunk=page_size, ids=ids, lora=lora, salt=salt)


NO_PROMPT: Final = Prompt()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was placed; handed back when it has ended. ``flying`` are the chunks that were counted for it."""

    replica: str
    held_chunks: int
    tokens: int
    report_number: int
    flying: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Followed:
    """An engine that tells what it caches. ``flying`` counts the chunks of its requests, which it will have."""

    cache: FollowedCache
    flying: Counter[int]


class Placement:
    """Places requests one by one. ``index_chunks`` bounds what is remembered of an engine that tells nothing."""

    def __init__(self, rules: Rules, *, index_chunks: int, seed: int = 0) -> None:
        self._rules = rules
        self._seed = seed
        self.fleet = Fleet(rules.tokens_a_request)
        self.index = PrefixIndex(index_chunks)
        self._followed: dict[str, _Followed] = {}
        # What was cached at the last report of a load: pages, and the version of the weights that they are of.
        self._cached: dict[str, tuple[int, int]] = {}

    def join(self, name: str, capacity: int, cache: FollowedCache | None = None) -> None:
        """Add an engine that takes requests: with an empty cache, or with what it tells of its cache."""
        self.fleet.join(name, capacity)
        if cache is not None:
            self.follow(name, cache)

    def follow(self, name: str, cache: FollowedCache) -> None:
        """Place by what an engine tells of its cache from now on, where the ids of a prompt are known."""
        self._followed[name] = _Followed(cache, Counter())

    def leave(self, name: str) -> None:
        """Remove an engine and all that is known of it."""
        self.fleet.leave(name)
        self.index.forget(name)
        self._followed.pop(name, None)
        self._cached.pop(name, None)

    def lost(self, name: str) -> None:
        """Place nothing there until its next report; what it is told to have cached may be that of an earlier life."""
        self.fleet.report(name, ReplicaLoad(), accepting=False)
        self.index.forget(name)
        if name in self._followed:
            self._followed[name].cache.doubt()

    def report(self, name: str, load: ReplicaLoad, *, accepting: bool = True, is_flushed: bool = False) -> None:
        """Take over an engine's report. One with ``is_flushed`` says that nothing is cached there any more."""
        self.fleet.report(name, load, accepting=accepting)
        if is_flushed:
            self.index.forget(name)

    def take_load(self, name: str, load: Mapping[str, Any]) -> None:
        """Take over what an engine that takes requests says of its load: also that it has dropped its cache."""
        pages, version = cached = load["cached_pages"], load["weights_version"]
        pages_before, version_before = self._cached.get(name, cached)
        self._cached[name] = cached
        reported = ReplicaLoad(
            running=load["num_running_reqs"],
            waiting=load["num_waiting_reqs"],
            pending_prefill_tokens=load["num_pending_tokens"],
            free_pages=load["free_pages"],
        )
        self.report(name, reported, is_flushed=version != version_before or (pages_before > 0 and pages == 0))

    def place(self, prompt: Prompt, left_out: Collection[str] = ()) -> Ticket | Refused:
        """Choose an engine for a prompt, and count the request as sent there."""
        told = self._followed if prompt.ids else {}
        held = {name: self._held(followed, prompt) for name, followed in told.items()}
        choice = choose(
            prompt.chain, self.fleet, self.index, self._rules, held=held, left_out=left_out, seed=self._seed
        )
        if not isinstance(choice, Choice):
            return choice
        to_compute = max(0, prompt.tokens - choice.held_chunks * prompt.tokens_a_chunk)
        report_number = self.fleet.sent(choice.replica, to_compute)
        followed = told.get(choice.replica)
        if followed is None:
            self.index.add(choice.replica, prompt.chain)
            return Ticket(choice.replica, choice.held_chunks, to_compute, report_number)
        followed.flying.update(prompt.chain)
        return Ticket(choice.replica, choice.held_chunks, to_compute, report_number, prompt.chain)

    def ended(self, ticket: Ticket) -> None:
        """Take a request's end into account, whatever it was."""
        self.fleet.ended(ticket.replica, ticket.tokens, ticket.report_number)
        followed = self._followed.get(ticket.replica)
        if followed is None:
            return
        for chunk in ticket.flying:
            followed.flying[chunk] -= 1
            if followed.flying[chunk] <= 0:
                del followed.flying[chunk]

    def _held(self, followed: _Followed, prompt: Prompt) -> int:
        """How many chunks of a prompt an engine has, by what it told, or will have when its live requests have come."""
        told = followed.cache.cached_pages(prompt.ids, prompt.lora, prompt.salt)
        return max(told, len([*takewhile(followed.flying.__contains__, prompt.chain)]))
