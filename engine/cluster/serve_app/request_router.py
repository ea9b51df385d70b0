"""Serve's request router over engines: translates between Serve and the pure placement policy.

Lives in the process of each front, in one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.cluster.router.proxy import PassedRequest
from engine.cluster.router.watch import Subscription
from engine.core.routing.cache_index import FollowedCache
from engine.core.routing.load import Load
from engine.core.routing.placement import Placement, Refused, ReplicaLoad, Rules, Ticket
from engine.frontend.schema.errors import ApiError, ErrorType


def refusal_of(refused: Refused) -> ApiError:
    if refused is Refused.FULL:
        return ApiError(ErrorType.BUSY, f"{refused.value}; try again, or raise replicas or max_queued_requests")
    return ApiError.unavailable(f"{refused.value}; they are starting, draining or failing, so try again")


class PrefixRequestRouter(RequestRouter):
    """Routes by prefix within a bound on imbalance."""

    # Serve asks a replica for its queue before the first request; the default of 0.1 s is too short on a busy machine.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 5.0

    def initialize_state(  # type: ignore[override] # Serve calls it with the arguments that the application gives
        self, *, capacity: int, index_chunks: int, balance_percent: int, balance_slack: int, seed: int
    ) -> None:
        """Take the options; called by Serve. ``capacity`` is the maximum number of requests that an engine takes at
        once.
        """
        self._capacity = capacity
        rules = Rules(balance_percent=balance_percent, balance_slack=balance_slack)
        self._placement = Placement(rules, index_chunks=index_chunks, seed=seed)
        # Tickets by Serve's id of a request, which a retry keeps.
        self._tickets: dict[str, Ticket] = {}
        # Subscriptions to the KV events of this node's engines; engines on other nodes publish on their own loopback.
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        self._subscriptions: dict[str, tuple[Subscription, asyncio.Task[None]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the list of replicas with their reports."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id: replica for replica in replicas}
        for gone in set(self._placement.fleet.names) - names.keys():
            self._forget(gone)
        for name, replica in names.items():
            if not self._placement.fleet.is_known(name):
                self._placement.join(name, self._capacity)
            self._report(name, replica.routing_stats or {})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica; Serve reports a death before its next list."""
        super().on_replica_actor_died(replica_id)
        if self._placement.fleet.is_known(replica_id.unique_id):
            self._forget(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose the replica for a request. If none can take it, its future gets the refusal."""
        if pending_request is None:
            return []
        # Serve waits between two attempts only if this is set.
        pending_request.routing_context.should_backoff = True
        self._drop_choice(pending_request)
        if pending_request.future.done():
            return [candidate_replicas[:1]]
        request = _passed(pending_request)
        ticket = self._placement.place(request.prompt, request.left_out)
        if isinstance(ticket, Refused):
            self._remove_pending_request_from_indices(pending_request)
            pending_request.future.set_exception(refusal_of(ticket))
            # Serve checks the future once it has a candidate, and then continues with the next request.
            return [candidate_replicas[:1]]
        chosen = [one for one in candidate_replicas if one.replica_id.unique_id == ticket.replica]
        if not chosen:
            self._placement.ended(ticket)
            return []
        # Counted before Serve carries it out, so that the next choice sees it.
        self._tickets[pending_request.metadata.internal_request_id] = ticket
        return [chosen]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Wait for the choice, and end it if the client leaves: Serve reports the completion of what it sent alone."""
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            self._drop_choice(pending_request)
            raise

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        ticket = self._tickets.get(internal_request_id)
        if ticket is not None and ticket.replica == replica_id.unique_id:
            self._end(internal_request_id, ticket)

    def _drop_choice(self, pending: PendingRequest) -> None:
        """Undo a choice if its replica refused the request, the front tries another one or the client has left."""
        request_id = pending.metadata.internal_request_id
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._end(request_id, ticket)

    def _end(self, request_id: str, ticket: Ticket) -> None:
        if self._tickets.get(request_id) is ticket:
            del self._tickets[request_id]
            self._placement.ended(ticket)

    def _report(self, name: str, stats: Mapping[str, Any]) -> None:
        load = stats.get("load")
        if not stats.get("accepting", True):
            self._placement.report(name, ReplicaLoad(), accepting=False)
        elif load is not None:
            self._placement.take_load(name, msgspec.convert(load, Load))
            self._follow(name, stats.get("events", {}))

    def _follow(self, name: str, events: Mapping[str, Any]) -> None:
        """Follow the KV events of an engine on this node, and ask it for missing batches."""
        if "page_size" not in events or events["node"] != self._node:
            return
        loop = asyncio.get_running_loop()
        if name not in self._subscriptions:
            subscription = Subscription(events["live"], events["replay"], FollowedCache(events["page_size"]))
            self._subscriptions[name] = subscription, loop.create_task(subscription.run())
            self._placement.follow(name, subscription.cache)
        asking = loop.create_task(self._subscriptions[name][0].ask())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    def _forget(self, name: str) -> None:
        self._placement.leave(name)
        if name in self._subscriptions:
            self._subscriptions.pop(name)[1].cancel()


def _passed(pending: PendingRequest) -> PassedRequest:
    """Return the request of a call of ``ask``; any other call has no prefix."""
    first = pending.args[0] if pending.args else None
    if isinstance(first, PassedRequest):
        return first
    return PassedRequest(method="", target="", headers=(), body=b"")
