"""Compares each step of the engine with the executable specification.

It decides nothing itself. A difference is reported by the first rule of docs/rules.md that it breaks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

from engine.core.limits import Limits
from engine.core.memory import HostTier, RadixTree, SlidingWindowPool
from engine.core.memory.node import page_keys
from engine.core.messages import (
    CallAnswer,
    Event,
    FinishReason,
    Generate,
    PrefillDropped,
    PrefillWanted,
    Refusal,
    Reply,
    StatsAnswer,
    TokenOutput,
    ended_by,
)
from engine.core.plan import (
    UNKNOWN_TOKEN,
    ForwardMode,
    LoraUpdate,
    Microbatch,
    ReceivePages,
    Segment,
    SendPages,
    StopTransfer,
    TransferOrder,
)
from engine.core.scheduler import Scheduler, StepResult
from engine.core.scheduler.loras import Loras
from engine.core.scheduler.sizes import pending_prefill_tokens
from engine.core.stats import EngineStats
from scripted.core.violation import Violation
from scripted_lockstep.specification.expected import Expected, ExpectedSegment, SpecifiedOrder
from scripted_lockstep.specification.host_tier import SpecifiedHostTier
from scripted_lockstep.specification.loras import SpecifiedLoras
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.request import Page
from scripted_lockstep.specification.specification import TOTALS, Specification

# The rules that a report can name, each with its sentence in docs/rules.md.
RULES: Final = {
    "LoRAs": "A request starts when the stages hold its LoRA",
    "Ahead": "With `async_scheduling` requests that are in one microbatch follow, in the same order",
    "Again": "A step that changed something asks for another step while a slot is free and there is work",
    "Calls": "Every call is answered once, in the step that carries it out or refuses it",
    "Cached tokens": "A client is told how many prompt tokens its request hit when it was first admitted",
    "Changes": "LoRAs are loaded and dropped one change at a time",
    "Chunks": "A prompt is launched in parts, each as large as the rest of the budget allows",
    "Copies": "Copies to and from the host travel with the next microbatch of prompts or decodes",
    "Counters": "Each request, token and retraction is counted once, in the step in which it happens",
    "Deferred": "A call that waits is carried out in the first step whose events leave the engine quiescent",
    "Drafts": "A decode without prompts beside it carries guesses of its next tokens",
    "End": "A request ends with the token that stops it, the one that fills its length, an abort or an error",
    "Evict": "When pages are missing, exactly that number is evicted: least recently used first",
    "Hit count": "A cached page has a hit for each confirmed prompt and each ended request that it is part of",
    "Gap": "With `max_gap_ms`, prompts beside running requests have no more tokens than take that long",
    "Grammar": "A request with a grammar is tried once its grammar is ready; no other request waits for it",
    "Hit": "A request hits the longest cached prefix in full pages, but never its last token",
    "Host hit": "Where the prefix cache ends, a request continues with the pages of its prompt that the host holds",
    "Host page": "An evicted page is written back, unless the host has it already",
    "Load": "The pending prefill tokens are the tokens of prompts that must still be launched",
    "Kept": "A grammar that no request uses is kept, up to `max_cached_grammars` of them",
    "Launch": "A step launches a microbatch when generation goes on, a slot is free and some work has room",
    "Mixed": "Without `mixed_chunk` a microbatch has prompts or decodes, never both",
    "Profile": "A profile is begun and ended by a microbatch of its own, in the first step with a free slot",
    "Order": "The queue is tried in the order of its policy, ties by arrival",
    "Places": "Every live request is in exactly one place",
    "Prompt logprobs": "Each prompt token whose logprob is asked for gets it once",
    "Publish": "Full pages of confirmed KV are published",
    "Receive": "A request with a prefill engine receives the full pages that it does not hit",
    "Send": "A prefill engine sends the full pages of a prompt as they are confirmed",
    "Refuse": "A request is refused for the first of these reasons",
    "Result": "A token is sent to the client in the step of its result, in the order of the segments",
    "Retract": "A request is retracted by a pause, by a decode that has no page, or by a more urgent request",
    "Room": "A request owns one row and the pages of its planned tokens, no more",
    "Sampling": "The last stage learns a request's sampling with the first part after each admission",
    "Sleep": "Sleeps and wakes are carried out in order, each by a microbatch that is launched alone",
    "Slide": "A request gives a window page back when no token that sees it is still to come back",
    "Time limits": "A request ends by itself in the first step whose time is not before its deadline",
    "Told": "Each page is sent to the stages once, and again where the cache's page takes its place",
    "Turns": "Of the running requests that are in no microbatch, the least recently launched decode first",
    "Verify": "The guesses before the first wrong one hold; the pages of the others are given back",
    "Window evict": "Window pages that no request sees are evicted when some are missing",
    "Use": "A prefix is used as a whole, by every attempt to admit, even a failed one, and by every publication",
    "Weight update": "An update is launched in the step that accepts it",
}
_OF_STATS: Final = {
    "pending_prefill_tokens": "Load",
    "alive": "Places",
    "forward_ct": "Launch",
    "waiting": "Places",
    "chunked": "Places",
    "running": "Places",
    "in_flight": "Places",
    "paused": "Calls",
    "sleep_level": "Sleep",
    "pages_free": "Room",
    "pages_held": "Room",
    "pages_cached": "Publish",
    "rows_free": "Room",
    "retractions": "Retract",
    "drafted_tokens": "Verify",
    "accepted_tokens": "Verify",
    "cached_tokens": "Cached tokens",
    "waiting_for_grammar": "Grammar",
    "grammar_hits": "Kept",
    "loras_resident": "LoRAs",
    "host_pages_free": "Host page",
    "host_pages_cached": "Copies",
    "host_pages_written": "Copies",
    "host_pages_loaded": "Copies",
    "host_hit_tokens": "Host hit",
    "open_transfers": "Send",
}
_OF_CONTROL: Final = {
    ForwardMode.UPDATE: "Weight update",
    ForwardMode.PROFILE: "Profile",
    ForwardMode.LORA: "Changes",
    ForwardMode.SLEEP: "Sleep",
}
_TELLS: Final = {ForwardMode.UPDATE: "path", ForwardMode.PROFILE: "folder", ForwardMode.SLEEP: "level"}
_MEANING: Final = tuple(_OF_STATS)
_OF_OUTPUT: Final = {
    "finish_reason": "End",
    "stop_token_id": "End",
    "error": "End",
    "cached_tokens": "Cached tokens",
    "cached_tokens_host": "Cached tokens",
    "prompt_logprobs": "Prompt logprobs",
}
_counted: Final = attrgetter("forward_ct", *TOTALS)
# The logprobs position of a segment without prompt logprobs.
_NOTHING_ASKED: Final[tuple[int, tuple[int, ...]]] = (-1, ())


class Nonconformance(Violation):
    """A step of the engine differs from the specification in this ``rule``."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule {rule}: {what}; docs/rules.md says: {RULES[rule]}")
        self.rule = rule


# For longer queues the load is compared only once in this many steps.
_MANY_WAIT: Final = 8


class Conformance:
    """Follows one scheduler from its start; ``specification`` is the state that it must be in."""

    def __init__(self, limits: Limits) -> None:
        self.specification = Specification(limits)
        # The state in which the load was compared last.
        self._load_at: tuple[Any, ...] = ()

    def check(self, events: Sequence[Event], now: float, result: StepResult, scheduler: Scheduler) -> None:
        """Compare a step that just ran. Raises Nonconformance."""
        evictions = self.specification.memory.evictions
        expected = self.specification.step(events, now)
        _compare_replies(expected.replies, result.replies)
        _compare_plan(expected, result.microbatch)
        evicted = self.specification.memory.evictions != evictions
        if events or result.replies or result.microbatch is not None or expected.again or evicted:
            if not self._agrees(scheduler, on_load=evicted):
                _compare_stats(self.specification.stats(), scheduler.stats())
            _compare_window(self.specification.memory, scheduler.memory.sliding_window)
        weights = self.specification.calls.weights[-1] or ""
        if weights != scheduler.books.weights:
            _must_be_equal("Weight update", "the weights that are noted", weights, scheduler.books.weights)
        if scheduler.limits.max_loras and events:
            _compare_loras(self.specification.loras, scheduler.features.loras)
        if expected.mode is ForwardMode.PREFILL or expected.mode is ForwardMode.MIXED:
            for rid in [segment.rid for segment in expected.segments]:
                specified, request = self.specification.live[rid], scheduler.books.requests[rid]
                counted = specified.parts, specified.retractions
                if counted != (request.chunks_done, request.retractions):
                    _must_be_equal("Chunks", f"the parts of {rid} so far", specified.parts, request.chunks_done)
                    _must_be_equal("Retract", f"how often {rid} was", specified.retractions, request.retractions)
        if evicted:
            self._check_contents(scheduler)
        if expected.grammars != result.grammars:
            _must_be_equal("Kept", "what the last stage is told of grammars", expected.grammars, result.grammars)
        if expected.loras != result.loras:
            _must_be_equal("Changes", "what the stages are told to read and to drop", expected.loras, result.loras)
        if expected.transfers or result.transfers:
            _compare_transfers(expected.transfers, result.transfers)
        if (expected.deadline, expected.again) != (result.deadline, result.again):
            rule = "Deferred" if expected.deadline == self.specification.calls.deadline else "Time limits"
            _must_be_equal(rule, "the deadline of what waits", expected.deadline, result.deadline)
            _must_be_equal("Again", "whether the loop goes on at once", expected.again, result.again)

    def _agrees(self, scheduler: Scheduler, *, on_load: bool) -> bool:
        """Compare all counters.

        The load is compared ``on_load``, or when the queue or the cache has changed, and for a long queue not in every
        step: computing it matches the prompt of every waiting request twice.
        """
        specification, memory = self.specification, self.specification.memory
        waiting, chunked = specification.waiting, specification.chunked
        if not _agree(specification, scheduler, len(waiting)):
            return False
        planned = 0 if chunked is None else chunked.planned_tokens
        at = [one.rid for one in waiting], planned, memory.cached_pages, memory.evictions
        is_known = memory.window is None and memory.host is None and not specification.transfers.open
        is_skipped = len(waiting) > _MANY_WAIT and specification.steps % _MANY_WAIT
        if not on_load and (is_skipped or (is_known and at == self._load_at)):
            return True
        self._load_at = at
        return specification.pending_tokens() == pending_prefill_tokens(scheduler.books, scheduler.memory)

    def check_refusal(self, message: Generate, refusal: Refusal, ahead: Iterable[Event]) -> None:
        """Compare a refusal from before the request's step, with ``ahead`` in front of it. Raises Violation."""
        specification = self.specification
        waits = {rid: not request.owns_memory for rid, request in specification.live.items()}
        behind = int(message.rid in waits)
        for other in ahead:
            if isinstance(other, Generate):
                waits[other.rid] = True
                behind += other.rid == message.rid
            for rid in ended_by(other, waits.keys()):
                del waits[rid]
        due = specification.why_refused(message, waits, sum(waits.values()))
        kind, says = (None, "") if due is None else due
        if refusal.kind is not kind:
            raise Nonconformance("Refuse", f"{message.rid} is refused as {refusal.kind}, but due is {kind}: {refusal}")
        if (refusal.rid, refusal.behind) != (message.rid, behind) or says not in refusal.message:
            raise Nonconformance(
                "Refuse", f"the refusal of {message.rid} must say {says!r} and {behind=}, but is {refusal}"
            )

    def check_cache(self, scheduler: Scheduler) -> None:
        """Compare the statistics and the whole cache: prefixes, their hits, and the order of their last uses."""
        _compare_stats(self.specification.stats(), scheduler.stats())
        self._check_contents(scheduler)

    def _check_contents(self, scheduler: Scheduler) -> None:
        memory, size = self.specification.memory, scheduler.limits.page_size
        _compare_cache(memory.cache, scheduler.memory.tree, size)
        if memory.host is not None and scheduler.memory.host is not None:
            _compare_host(memory.host, scheduler.memory.host, size)


def _must_be_equal(rule: str, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Nonconformance(rule, f"{what} must be {expected!r}, but is {found!r}")


# -- plans --


def _compare_plan(expected: Expected, microbatch: Microbatch | None) -> None:
    if microbatch is None:
        if expected.mode is not None:
            rids = [segment.rid for segment in expected.segments]
            raise Nonconformance("Launch", f"a {expected.mode} microbatch of {rids} must be launched, but none is")
        return
    if expected.mode is None:
        raise Nonconformance("Launch", f"nothing may be launched, but {microbatch.mode} of {microbatch.rids} is")
    number, mode, segments = microbatch.id, microbatch.mode, microbatch.segments
    for one, other in zip(expected.segments, segments, strict=False):
        _compare_segment(number, one, other)
    # At this point the rids that both have are equal.
    if len(segments) != len(expected.segments):
        rids = [segment.rid for segment in expected.segments]
        first = (expected.segments[len(segments) :] or segments[len(rids) :])[0]
        which = "Turns" if first.sampling is None else "Order"
        raise Nonconformance(which, f"microbatch {number} must be of {rids}, but is of {list(microbatch.rids)}")
    order = getattr(microbatch, _TELLS[expected.mode], None) if expected.mode in _TELLS else None
    change = microbatch.change if isinstance(microbatch, LoraUpdate) else None
    copies = (0, 0) if microbatch.copies is None else (len(microbatch.copies.out), len(microbatch.copies.into))
    due = expected.mode, expected.order, expected.lora, expected.number, expected.copies
    if due == (mode, order, change, number, copies):
        return
    rule, what = _OF_CONTROL.get(expected.mode, "Mixed"), f"microbatch {number}"
    _must_be_equal(rule, f"the mode of {what}", expected.mode, mode)
    _must_be_equal(rule, f"what {what} tells the stages", expected.order, order)
    _must_be_equal("Changes", f"the change of LoRAs of {what}", expected.lora, change)
    _must_be_equal("Launch", "the number of the microbatch", expected.number, number)
    _must_be_equal("Copies", f"the number of copies to and from the host of {what}", expected.copies, copies)


def _compare_segment(number: int, expected: ExpectedSegment, segment: Segment) -> None:
    if segment.rid != expected.rid:
        rule = "Turns" if expected.sampling is None and segment.sampling is None else "Order"
        what = f"microbatch {number} must go on with {expected.rid}, but goes on with {segment.rid}"
        raise Nonconformance(rule, what)
    window = tuple([page >= 0 for page in segment.window_pages]) if segment.window_pages else ()
    what_pages = segment.page_start, len(segment.pages)
    asked = (segment.logprobs_from, segment.targets) if segment.logprobs_from >= 0 else _NOTHING_ASKED
    if (
        expected.rid,
        segment.start,
        segment.token_ids,
        *what_pages,
        segment.emits,
        segment.sampling,
        window,
        segment.drafts,
        *asked,
        segment.lora,
    ) == expected:
        return
    what = f"microbatch {number}, {expected.rid}"
    _must_be_equal("Hit", f"{what}: its first position", expected.start, segment.start)
    _must_be_equal("Drafts", f"{what}: its drafts", expected.drafts, segment.drafts)
    if expected.drafts:
        _must_be_equal("Drafts", f"{what}: its token ids", expected.token_ids, segment.token_ids)
    _must_be_equal("Chunks", f"{what}: its tokens", len(expected.token_ids), len(segment.token_ids))
    rule = "Ahead" if UNKNOWN_TOKEN in (*expected.token_ids, *segment.token_ids) else "Result"
    _must_be_equal(rule, f"{what}: its token ids", expected.token_ids, segment.token_ids)
    _must_be_equal("Chunks", f"{what}: whether it emits a token", expected.emits, segment.emits)
    _must_be_equal("Sampling", f"{what}: its sampling", expected.sampling, segment.sampling)
    due = (expected.logprobs_from, expected.targets)
    _must_be_equal("Prompt logprobs", f"{what}: the tokens whose logprobs it asks for, and after which one", due, asked)
    _must_be_equal("LoRAs", f"{what}: the version of its LoRA", expected.lora, segment.lora)
    new_pages = (expected.page_start, expected.pages)
    _must_be_equal("Told", f"{what}: place and number of its pages", new_pages, what_pages)
    _must_be_equal("Slide", f"{what}: which of its pages have a window page", expected.window_pages, window)


def _compare_loras(expected: SpecifiedLoras, loras: Loras) -> None:
    """Compare the resident LoRAs, their versions and last uses, from which the next victim follows."""
    due = {one.name: (one.version, one.used) for one in expected.resident}
    found = {one.name: (one.version, one.used) for one in loras.known.values() if one.version}
    _must_be_equal("LoRAs", "the resident LoRAs, with their versions and last uses,", due, found)


def _compare_window(memory: SpecifiedMemory, window: SlidingWindowPool | None) -> None:
    if memory.window is None or window is None:
        return
    cached, free = len(memory.window.beside), memory.window.free_pages(memory.owners)
    _must_be_equal("Window evict", "the number of cached window pages", cached, window.pages.cached)
    _must_be_equal("Slide", "the number of free window pages", free, window.pages.free)


def _compare_host(expected: SpecifiedHostTier, host: HostTier, size: int) -> None:
    """Compare the pages on the host in the order of their last uses."""
    ready = [_key_of(prefix, size) for prefix, page in expected.kept.items() if page.state == "ready"]
    found = [page.key for page in host.kept.values() if page.is_ready]
    if ready != found:
        kept = [prefix for prefix, page in expected.kept.items() if page.state == "ready"]
        raise Nonconformance("Host page", f"the host must have {kept} in this order, but has {len(found)} other pages")


@functools.lru_cache(maxsize=4096)
def _key_of(prefix: tuple[Any, ...], size: int) -> bytes:
    """Return the key of the last page of a prefix."""
    kv_key, *ids = prefix
    return [*page_keys(ids, size, kv_key)][-1]


def _compare_cache(cache: Page, tree: RadixTree, size: int) -> None:
    """Check that exactly the specified prefixes are cached."""
    last, leaves = {tree.root: cache}, list[tuple[int, int]]()
    for node in tree.nodes():
        assert node.parent is not None, f"{node} is the root"
        page = last[node.parent]
        for start in range(0, len(node.tokens), size):
            tokens = node.tokens[start : start + size]
            key = node.kv_key, *tokens
            if key not in page.below:
                raise Nonconformance("Evict", f"the page {tokens} after {page.tokens} must be evicted, but is cached")
            page = page.below[key]
            if page.hits != node.hit_count:
                what = f"{tokens} after {node.parent}"
                raise Nonconformance("Hit count", f"{what} must have {page.hits} hits, but has {node.hit_count}")
        last[node] = page
        if not node.children:
            leaves.append((node.last_used, page.used))
    leaves.sort()
    if any(earlier > later for (_, earlier), (_, later) in itertools.pairwise(leaves)):
        raise Nonconformance("Use", f"leaves were used last in (this order, another order): {leaves}")


def _compare_transfers(expected: Sequence[SpecifiedOrder], orders: Sequence[TransferOrder]) -> None:
    found = [_specified(order) for order in orders]
    if list(expected) != found:
        kinds = {order[0] for order in (*expected, *found)}
        rule = "Send" if "send" in kinds else "Receive"
        _must_be_equal(rule, "what the stages are told of transfers", list(expected), found)


def _specified(order: TransferOrder) -> SpecifiedOrder:
    match order:
        case ReceivePages():
            return "receive", order.transfer, len(order.pages)
        case SendPages():
            return "send", order.transfer, len(order.pages), order.to, order.to_transfer, order.first
        case StopTransfer():
            return "stop", order.transfer


# -- replies --


def _compare_replies(expected: Sequence[Reply], replies: Sequence[Reply]) -> None:
    if not expected and not replies:
        return
    for one, other in zip(expected, replies, strict=False):
        if one != other:
            _compare_reply(one, other)
    if len(expected) != len(replies):
        rest = [*expected[len(replies) :], *replies[len(expected) :]]
        missing = "is missing" if len(expected) > len(replies) else "must not be told"
        raise Nonconformance(_rule_of(rest[0]), f"{rest[0]} {missing}")


def _compare_reply(expected: Reply, reply: Reply) -> None:
    if type(expected) is not type(reply):
        raise Nonconformance(_rule_of(expected), f"{expected} must be told, but {reply} is")
    if isinstance(expected, StatsAnswer) and isinstance(reply, StatsAnswer):
        _compare_stats(expected.stats, reply.stats)
    for name in expected.__struct_fields__:
        one, other = getattr(expected, name), getattr(reply, name)
        is_limit = name == "error" and getattr(expected, "finish_reason", None) is FinishReason.TIMEOUT
        if name == "message" or is_limit:
            if one not in (other or ""):
                raise Nonconformance(_rule_of(expected), f"{other!r} must say {one!r}")
        elif one != other:
            rule = _OF_OUTPUT.get(name, "Result") if isinstance(expected, TokenOutput) else _rule_of(expected)
            raise Nonconformance(rule, f"{name} of {reply} must be {one!r}")


def _rule_of(reply: Reply) -> str:
    if isinstance(reply, TokenOutput) and reply.prompt_logprobs:
        return "Prompt logprobs"
    if isinstance(reply, TokenOutput):
        ends = "Time limits" if reply.finish_reason is FinishReason.TIMEOUT else "End"
        return "Result" if reply.finish_reason is None else ends
    if isinstance(reply, PrefillWanted | PrefillDropped):
        return "Receive"
    return "Refuse" if isinstance(reply, Refusal) else "Calls" if isinstance(reply, CallAnswer) else "Counters"


# -- sizes and counters --


def _agree(specification: Specification, scheduler: Scheduler, waiting: int) -> bool:
    """Return whether all counters are equal, without making the statistics: they cost as much as all other checks."""
    memory, specified, loras = scheduler.memory, specification.memory, specification.loras
    return (
        _specified_sizes(specification, waiting) == _sizes_of(scheduler)
        and (not specification.limits.max_loras or len(loras.resident) == scheduler.features.loras.resident)
        and (specified.host is None or memory.host is None or _agree_on_host(specified.host, memory.host))
    )


def _specified_sizes(specification: Specification, waiting: int) -> tuple[object, ...]:
    memory = specification.memory
    return (
        specification.steps,
        waiting,
        specification.chunked is None,
        len(specification.running),
        len(specification.flights),
        specification.paused,
        specification.calls.sleep_level,
        len(specification.live),
        memory.free_pages,
        memory.cached_pages,
        memory.free_rows,
        specification.grammars.waiting(),
        len(specification.transfers.open),
        specification.launched,
        *specification.totals.values(),
    )


def _sizes_of(scheduler: Scheduler) -> tuple[object, ...]:
    books, memory = scheduler.books, scheduler.memory
    return (
        scheduler.step_number,
        len(books.waiting),
        books.chunked is None,
        len(books.running),
        len(books.in_flight),
        books.paused,
        books.sleep_level,
        len(books.requests),
        memory.pages.free,
        memory.pages.cached,
        memory.rows.free,
        scheduler.features.grammars.waiting,
        books.open_transfers,
        *_counted(scheduler.counters),
    )


def _agree_on_host(expected: SpecifiedHostTier, host: HostTier) -> bool:
    return tuple(expected.sizes().values()) == (host.pages.total, host.pages.free, host.pages.cached)


def _compare_stats(expected: EngineStats, stats: EngineStats) -> None:
    if expected == stats:
        return
    differing = [name for name in stats.__struct_fields__ if getattr(expected, name) != getattr(stats, name)]
    # A wrong counter says more than the sizes that follow from it.
    first = max(differing, key=lambda name: _MEANING.index(name) if name in _MEANING else len(_MEANING))
    _must_be_equal(_OF_STATS.get(first, "Counters"), first, getattr(expected, first), getattr(stats, first))
