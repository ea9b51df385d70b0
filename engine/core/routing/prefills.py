"""Chooses the prefill engine of each prompt of a decode engine, and tracks the calls.

A machine without sockets, threads and clocks: it takes requests, the scheduler's orders, answers and loads, and returns
choices and messages to the scheduler. Owns the health of each prefill engine. A shell around it makes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.core.messages import FinishReason, Generate, PrefillFailed, PrefillWanted, Refusal, TokenOutput, salt_key
from engine.core.routing.load import Load
from engine.core.routing.placement import Placement, Prompt, Refused, ReplicaLoad, Rules, Ticket

# The pages of a prompt that the choice compares, and the pages remembered for each engine.
CHOICE_PAGES: Final = 256
INDEX_PAGES: Final = 32_768
# The pause after a failure, doubled by each further one; then the engine gets one prompt at a time until one succeeds.
FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 30.0
NEWS_INTERVAL_S: Final = 60.0
# HTTP statuses that concern one prompt only.
_OF_THE_PROMPT: Final = frozenset({400, 409, 413})
PREFILL: Final = "prefill"
# The finish reasons of a request whose prompt was computed.
_COMPUTED: Final = (None, FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class PrefillCounts:
    """Totals of prompts. The KV of an ``answered`` prompt has arrived; a ``dropped`` one was no longer needed; an
    ``unasked`` one found no prefill engine.
    """

    asked: int = 0
    answered: int = 0
    failed: int = 0
    dropped: int = 0
    unasked: int = 0


@dataclass(slots=True)
class _Engine:
    """``why_not`` is the last known reason to avoid the engine, empty if it takes prompts. An ``is_unlike`` one can be
    no partner until it has been started again.
    """

    why_not: str = "has not answered yet"
    is_unlike: bool = False
    last_failure: str = ""
    failures: int = 0
    retry_at: float = 0.0
    is_told: bool = False
    news_at: float | None = None


@dataclass(slots=True)
class _Call:
    """A prompt ordered from ``at``. It ends when the engine has answered and the request has continued.

    The request continues without a failure when all pages have arrived.
    """

    at: str
    rid: str
    asked_at: float
    has_answered: bool = False
    has_gone_on: bool = False
    has_come: bool = False


class Prefills:
    """The prefill engines of one decode engine, by their URLs. ``now`` returns seconds of a monotonic clock.

    ``capacity`` is the maximum number of prompts of one engine at a time. ``retry_s=0`` ignores the health of engines.
    An engine with another page size, ``version`` or ``kv_origin`` is not used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        page_size: int,
        capacity: int,
        now: Callable[[], float],
        retry_s: float = FIRST_RETRY_S,
        version: str = "",
        kv_origin: str = "",
    ) -> None:
        self._page_size = page_size
        self._kv_origin = kv_origin
        self._version = version
        self._retry_s = retry_s
        self._now = now
        self._placement = Placement(Rules(), index_chunks=INDEX_PAGES)
        self._engines: dict[str, _Engine] = {}
        for url in urls:
            self._engines[url] = _Engine()
            self._placement.join(url, capacity)
            self._placement.lost(url)
        # Keyed by rid, until the request's first output.
        self._tickets: dict[str, Ticket] = {}
        self._calls: dict[int, _Call] = {}
        # The newest call for each request.
        self._transfers: dict[str, int] = {}
        # The choices of an answer have the same prompt.
        self._last_ids: tuple[int, ...] = ()
        self._last_prompt = Prompt()
        self.counts = PrefillCounts()

    @property
    def urls(self) -> Sequence[str]:
        return tuple(self._engines)

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    def in_flight(self, url: str) -> int:
        """Return the requests without an output that have a prefill engine."""
        return self._placement.fleet.in_flight(url)

    # -- requests --

    def place(self, message: Generate) -> Generate:
        """Return the request with its prefill engine, if there is one.

        The decode engine computes prompts without a full page before the last token, with a LoRA, or with prompt
        logprobs.
        """
        pages = (len(message.prompt_ids) - 1) // self._page_size
        if not pages or message.lora is not None or message.prompt_logprobs_from >= 0:
            return message
        ticket = self._placement.place(self._prompt_of(message), self._left_out())
        if isinstance(ticket, Refused):
            self.counts.unasked += 1
            return message
        self._give_back(message.rid)
        self._tickets[message.rid] = ticket
        return msgspec.structs.replace(message, prefill_at=ticket.replica)

    def heard(self, reply: TokenOutput | Refusal, *, is_newest: bool = True) -> None:
        """Note an output or a refusal of a request: no prefill engine computes its prompt any longer.

        Unless it ``is_newest``, a later request of its rid has been placed.
        """
        if is_newest:
            self._give_back(reply.rid)
        if isinstance(reply, Refusal):
            # Its prompt was never ordered; a call for its rid is another request's.
            return
        transfer = self._transfers.get(reply.rid)
        if transfer is None:
            return
        call = self._calls[transfer]
        if not call.has_gone_on:
            call.has_gone_on = True
            call.has_come = reply.finish_reason in _COMPUTED
        self._end_if_over(transfer, call)

    # -- calls --

    def wanted(self, wanted: PrefillWanted) -> PrefillFailed | None:
        """Order a prompt that the scheduler wants. Returns the failure if the engine must not be called now."""
        self.counts.asked += 1
        older = self._transfers.get(wanted.rid)
        if older is not None and not self._calls[older].has_gone_on:
            # The request lost the pages before it went on with them, as by a sleep.
            self.dropped(older)
        engine = self._engines.get(wanted.at)
        why = "is not a prefill engine of this engine" if engine is None else self.why_not(wanted.at)
        is_asked = any(call.at == wanted.at for call in self._calls.values())
        if not why and engine is not None and engine.failures and is_asked:
            why = f"is being retried with another prompt: it {engine.last_failure}"
        if why:
            self.counts.failed += 1
            return PrefillFailed(transfer=wanted.transfer, error=f"{wanted.at} {why}")
        self._calls[wanted.transfer] = _Call(wanted.at, wanted.rid, self._now())
        self._transfers[wanted.rid] = wanted.transfer
        return None

    def dropped(self, transfer: int, *, is_late: bool = False) -> bool:
        """Drop a prompt that is no longer needed or ``is_late``. Returns whether an engine was called for it."""
        call = self._take(transfer)
        if call is None:
            return False
        self.counts.dropped += not is_late
        self.counts.failed += is_late
        if is_late:
            self._fail(call.at, f"did not send a prompt's KV within {self._now() - call.asked_at:.1f} s")
        return True

    def answered(self, transfer: int) -> float | None:
        """Note that an engine has sent all pages, a success once the request continues with them.

        Returns the duration in seconds; None for a dropped prompt.
        """
        call = self._calls.get(transfer)
        if call is None:
            return None
        call.has_answered = True
        self._end_if_over(transfer, call)
        return self._now() - call.asked_at

    def failed(self, transfer: int, why: str, status: int | None = None) -> PrefillFailed | None:
        """Return the failure for the scheduler when an engine answered with an error or was lost."""
        call = self._take(transfer)
        if call is None:
            return None
        self.counts.failed += 1
        if status not in _OF_THE_PROMPT:
            self._fail(call.at, why)
        return PrefillFailed(transfer=transfer, error=f"{call.at} {why}")

    def give_up(self) -> None:
        """Drop the calls of a lost scheduler."""
        self._calls.clear()
        self._transfers.clear()
        for rid in list(self._tickets):
            self._give_back(rid)

    # -- prefill engines --

    def met(self, url: str, load: Load) -> None:
        """Take the load that an engine reports."""
        engine, unlike = self._engines[url], self._why_unlike(load)
        engine.is_unlike = unlike is not None
        if unlike is not None or load.sleep_level:
            self.lost(url, unlike or "is asleep")
            return
        engine.why_not = ""
        self._placement.take_load(url, load)

    def _why_unlike(self, load: Load) -> str | None:
        """Return why the engine with this load can be no partner; None if it can."""
        if load.role != PREFILL:
            return f"must be a prefill engine, got one with role={load.role!r}; start it with --role prefill"
        if load.version != self._version:
            return f"must be version {self._version!r} as this engine, got {load.version!r}; run the same on both"
        if load.page_size != self._page_size:
            return f"must have page_size={self._page_size} as this engine, got {load.page_size}; give both the same"
        # After an update the scheduler compares the weights with each prompt.
        if load.kv_origin and self._kv_origin not in ("", load.kv_origin):
            return (
                f"must have the model and weights of this engine, {self._kv_origin}, got {load.kv_origin}; give both "
                "the same revision of the checkpoint, and the same --weights"
            )
        return None

    def busy(self, url: str) -> None:
        """Note that an engine answers, although its scheduler is too busy to report a load."""
        engine = self._engines[url]
        if engine.why_not and not engine.is_unlike:
            engine.why_not = ""
            self._placement.report(url, ReplicaLoad())

    def lost(self, url: str, why: str) -> None:
        """Note that an engine does not answer, or cannot be used."""
        self._engines[url].why_not = why
        self._placement.lost(url)

    def why_not(self, url: str) -> str:
        """Return why an engine is not called now; empty if it is."""
        engine = self._engines[url]
        if not self._retry_s:
            return ""
        return engine.why_not or (engine.last_failure if self._now() < engine.retry_at else "")

    def news(self) -> list[tuple[str, str]]:
        """Return the engines to which calls stopped, with the reason, or resumed, without one; each at most once a
        minute.
        """
        now, changes = self._now(), []
        for url, engine in self._engines.items():
            why = engine.why_not or engine.last_failure
            is_due = engine.news_at is None or now - engine.news_at >= NEWS_INTERVAL_S
            if (why and is_due) or (engine.is_told and not why):
                engine.is_told = bool(why)
                if why:
                    engine.news_at = now
                changes.append((url, why))
        return changes

    # -- inside --

    def _take(self, transfer: int) -> _Call | None:
        call = self._calls.pop(transfer, None)
        if call is not None and self._transfers.get(call.rid) == transfer:
            del self._transfers[call.rid]
        return call

    def _end_if_over(self, transfer: int, call: _Call) -> None:
        if not (call.has_answered and call.has_gone_on):
            return
        self._take(transfer)
        if call.has_come:
            self.counts.answered += 1
            engine = self._engines[call.at]
            engine.failures, engine.last_failure = 0, ""

    def _give_back(self, rid: str) -> None:
        ticket = self._tickets.pop(rid, None)
        if ticket is not None:
            self._placement.ended(ticket)

    def _prompt_of(self, message: Generate) -> Prompt:
        ids = message.prompt_ids
        if ids is not self._last_ids:
            begin = ids[: CHOICE_PAGES * self._page_size]
            chain = Prompt.of_ids(begin, self._page_size, salt=salt_key(message.cache_salt)).chain
            prompt = Prompt(chain=chain, tokens=len(ids), tokens_a_chunk=self._page_size)
            self._last_ids, self._last_prompt = ids, prompt
        return self._last_prompt

    def _left_out(self) -> list[str]:
        """Return the engines that are not called now, and the failed ones that another prompt is trying."""
        fleet = self._placement.fleet
        return [
            url
            for url, engine in self._engines.items()
            if engine.why_not or (engine.failures and (self.why_not(url) or fleet.in_flight(url)))
        ]

    def _fail(self, url: str, why: str) -> None:
        engine, now = self._engines[url], self._now()
        engine.last_failure = why
        if not self._retry_s:
            return
        # Prompts that failed together count as one failure.
        if now >= engine.retry_at:
            engine.retry_at = now + min(self._retry_s * 2**engine.failures, LONGEST_RETRY_S)
            engine.failures = min(engine.failures + 1, 8)
