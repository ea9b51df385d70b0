"""A live engine as an SDK machine: events go in over HTTP, and the gate shows what the engine's loop does."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripted.core.action import Action, RunLike
from scripted.core.violation import Violation
from scripted.sdk.live.clients import HttpCall
from scripted.sdk.live.launch import FOLDER_VARIABLE, MODEL
from scripted.sdk.live.stops import LoopStops
from scripted.sdk.live.weights import VERSIONS, WEIGHTS, History
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchResult,
    Event,
    FlushCache,
    Pause,
    Reply,
    Resume,
    Signal,
    Stepped,
    Tokens,
)

ABORT: Final = "abort"
# Calls outside of scripts. Their work ends with the answer, or continues after it.
_ALONE: Final = "alone"
_GOES_ON: Final = "goes-on"
_MOST_STEPS: Final = 4000
# A loop plans again after an empty plan, forever. After this many consecutive empty plans, all later ones are empty.
_EMPTY_PLANS: Final = 3


class LiveEngine(ABC):
    """One script's view of a running engine. A subclass defines how to talk to its engine and read its plans."""

    depth = 1
    # The pause that keeps running requests in place.
    keeping: str

    def __init__(self, stops: LoopStops, port: int) -> None:
        self._stops = stops
        self._gate = stops.gate
        self._port = port
        # The connection of each live request, and the tokens it has been sent.
        self._clients: dict[str, HttpCall] = {}
        self._reported: dict[str, list[int]] = {}
        self._posts: dict[str, HttpCall] = {}
        self._replies: list[Reply] = []
        # The requests whose clients hung up in this step.
        self._gone: set[str] = set()
        self._empty = 0
        self._first = stops.batches
        # The weights loaded last, and the call that loads others.
        self._weights = VERSIONS[0]
        self._loading: HttpCall | None = None
        # A script begins with an empty cache.
        self._alone([FlushCache(call_id=_ALONE)])

    # -- defined by a subclass --

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the engine has no request and no batch in flight."""

    @abstractmethod
    def counts(self) -> Mapping[str, int]:
        """Return the engine's counts, by name."""

    @property
    @abstractmethod
    def may_go_on(self) -> bool:
        """Whether the loop would plan again if it continued."""

    def call(self, event: Any) -> None:
        """Send an administrative call. Raises TypeError for a call that the engine does not have."""
        raise TypeError(f"this live engine has nothing for {event}")

    @abstractmethod
    def load(self, folder: str) -> HttpCall:
        """Start loading the weights in a folder, keeping all computed KV."""

    @abstractmethod
    def start(self, event: Add) -> None:
        """Send a request."""

    @abstractmethod
    def abort(self, rid: str, client: HttpCall) -> None:
        """Abort a request whose client is waiting."""

    @abstractmethod
    def planned(self) -> tuple[Batch | None, tuple[str, ...]]:
        """Return this step's launch, and the requests that lost their blocks."""

    @abstractmethod
    def hear(self) -> None:
        """Return the engine's replies of this step."""

    # -- for the run --

    def obstacle(self, run: RunLike) -> Action | None:
        """Return no obstacle: a live engine holds nothing that a script does not."""
        del run
        return None

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Release these events and the due results, and run the loop until it waits again."""
        del now
        self._replies, self._gone = [], set()
        self._stops.begin_step()
        for event in events:
            self._take(event)
        if not self._stops.waits_for_result:
            self._gate.go_on()
        batch, preempted = self.planned()
        self.hear()
        self._settle()
        self._empty = 0 if batch is not None or preempted or events else self._empty + 1
        again = self._empty < _EMPTY_PLANS and self.may_go_on
        return Stepped(microbatch=batch, replies=tuple(self._replies), preempted=preempted, again=again)

    def say_alone(self, message: Add, history: History = ((0, VERSIONS[0]),)) -> tuple[int, ...]:
        """Run a request alone on the engine, with an empty cache and these changes of weights; return its tokens."""
        (_, version), *changes = history
        self._change_weights(version)
        self._alone([FlushCache(call_id=_ALONE)])
        said = self._alone(
            [
                Add(
                    rid=f"{message.rid}-alone",
                    prompt_ids=message.prompt_ids,
                    max_new_tokens=message.max_new_tokens,
                    stop_token_ids=message.stop_token_ids,
                )
            ],
            dict(changes),
        )
        self._change_weights(VERSIONS[0])
        return said

    def _change_weights(self, version: int) -> None:
        if version != self._weights:
            self.step([Signal(name=WEIGHTS, value=version)], 0.0)

    def close(self) -> None:
        for client in self._clients.values():
            client.hang_up()

    def _alone(self, events: list[Event], changes: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """Run these events alone until they end. ``changes`` are versions of weights by position."""
        said: list[int] = []
        for _ in range(_MOST_STEPS):
            stepped = self.step(events, 0.0)
            said += [token for reply in stepped.replies if isinstance(reply, Tokens) for token in reply.token_ids]
            if any(map(_ends_alone, stepped.replies)):
                return tuple(said)
            batch = stepped.microbatch
            events = [] if batch is None else [BatchResult(batch_id=batch.id, token_ids=())]
            position = 0 if batch is None else batch.shares[0].start + batch.shares[0].count
            if changes and position in changes:
                said += self._alone([*events, Pause(call_id=_ALONE, mode=self.keeping)])
                self._change_weights(changes[position])
                events = [Resume(call_id=_GOES_ON)]
        raise Violation(f"a request alone does not end within {_MOST_STEPS} steps")

    # -- events --

    def _take(self, event: Event) -> None:
        match event:
            case Add():
                self._reported[event.rid] = []
                self.start(event)
            case Abort():
                client = self._clients.get(event.rid)
                if client is not None and not client.closed:
                    self.abort(event.rid, client)
            case BatchResult():
                self._stops.released = self._first + event.batch_id
            case Signal() if event.name == WEIGHTS:
                self._weights = event.value
                self._loading = self.load(str(Path(os.environ[FOLDER_VARIABLE]) / MODEL / str(event.value)))
            case _:
                self.call(event)

    def post(self, call_id: str, path: str, body: Mapping[str, object] | None = None) -> HttpCall:
        """Start an administrative call."""
        call = self._posts[call_id] = HttpCall(self._gate, self._port, path, body or {})
        return call

    def arrived(self, what: str, call: HttpCall | None, is_it: Callable[[Any], bool] = bool) -> list[Any]:
        """Release the message of a call, unless the engine answers without a message."""
        inbox = self._stops.inbox
        self._gate.wait(
            lambda: any(map(is_it, inbox.held)) or (call is not None and call.closed), f"{what} at the engine"
        )
        return inbox.let_in()

    # -- outputs --

    def tell(self, rid: str, token_ids: Sequence[int], reason: str | None) -> None:
        """Note the engine's reply to a request."""
        self._reported[rid] += token_ids
        self._replies.append(Tokens(rid=rid, token_ids=tuple(token_ids), finish_reason=reason))

    def answer(self, call_id: str, *, ok: bool | None = None, text: str = "") -> None:
        """Note the engine's answer to a call; if the engine does not report success, take the front end's status."""
        post = self._posts.pop(call_id)
        self._gate.wait(lambda: post.closed, f"the answer to {call_id}")
        self._replies.append(Answer(call_id=call_id, ok=post.ok if ok is None else ok, text=text))

    def loaded(self) -> None:
        """Note loaded weights, and check the front end's answer. Raises Violation for a failure."""
        call, self._loading = self._loading, None
        if call is None:
            return
        self._gate.wait(lambda: call.closed, "the end of loading weights")
        if not call.ok:
            raise Violation(f"other weights were not loaded: {call.text}")

    def _settle(self) -> None:
        """Wait until every client has received the engine's replies. Raises Violation for any difference."""
        ended = {reply.rid: reply.finish_reason for reply in self._replies if isinstance(reply, Tokens)}
        for rid, reason in ended.items():
            client = self._clients.get(rid)
            if client is not None and rid not in self._gone:
                self._settle_client(rid, client, reason)

    def _settle_client(self, rid: str, client: HttpCall, reason: str | None) -> None:
        token_ids = self._reported[rid]
        self._gate.wait(
            lambda: client.closed or len(client.token_ids) >= len(token_ids),
            f"{len(token_ids)} tokens at the client of {rid}",
        )
        if reason is not None:
            self._gate.wait(lambda: client.closed, f"the end at the client of {rid}")
            del self._clients[rid]
        if client.token_ids != token_ids:
            raise Violation(f"the engine tells {rid} {token_ids}, but its client hears {client.token_ids}")


def _ends_alone(reply: Reply) -> bool:
    if isinstance(reply, Answer):
        return reply.call_id == _ALONE
    return isinstance(reply, Tokens) and reply.finish_reason is not None
