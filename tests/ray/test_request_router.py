"""Serve's request router of engines, over replicas that a test plays: no cluster, the policy behind Serve's interface.

Goal: what Serve tells the router arrives in the policy; every choice is counted once and ended once. Method: Serve's
own base class, driven as its fronts drive it. Origin: the replicas of an application. Mutant: none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context
from ray.serve.request_router import PendingRequest

from ci.register import register_cpu_ci
from engine.cluster.router.proxy import PassedRequest
from engine.cluster.serve_app.application import RayEngines
from engine.cluster.serve_app.request_router import PrefixRequestRouter
from engine.core.memory.node import page_keys
from engine.core.messages import PagesStored
from engine.core.routing.placement import Prompt
from engine.frontend.http.kv_events import KvEvents
from engine.frontend.schema.errors import ApiError

register_cpu_ci(est_time=8, suite="ray-cpu")

ENGINES = DeploymentID(name="engine", app_name="app")
CHAIN = (1, 2, 3)
Scene = Callable[[PrefixRequestRouter], Awaitable[None]]


def replica(name: str, **stats: Any) -> Any:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(unique_id=name, deployment_id=ENGINES),
        routing_stats=stats,
        max_ongoing_requests=100,
        get_queue_len=get_queue_len,
    )


def load(requests: int = 0, **more: int) -> dict[str, Any]:
    zeros = dict.fromkeys(
        ("num_waiting_reqs", "num_pending_tokens", "free_pages", "cached_pages", "weights_version", "sleep_level"), 0
    )
    return {"role": "both", **zeros, "num_running_reqs": requests, **more}


def pending(
    request_id: str, chain: tuple[int, ...] = CHAIN, left_out: tuple[str, ...] = (), prompt: Prompt | None = None
) -> PendingRequest:
    prompt = prompt or Prompt(chain=chain)
    passed = PassedRequest(method="POST", target="/generate", headers=(), body=b"", prompt=prompt, left_out=left_out)
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id)
    return PendingRequest(args=[passed], kwargs={}, metadata=metadata)


def play(scene: Scene, capacity: int = 4) -> None:
    async def bounded() -> None:
        router = PrefixRequestRouter(ENGINES, DeploymentHandleSource.REPLICA)
        router.initialize_state(capacity=capacity, index_chunks=64, balance_percent=125, balance_slack=2, seed=1)
        async with asyncio.timeout(30):
            await scene(router)

    asyncio.run(bounded())


async def chosen(router: PrefixRequestRouter, request: PendingRequest) -> str:
    ((one,),) = await router.choose_replicas(router._replicas_list, request)
    return str(one.replica_id.unique_id)


def weights(router: PrefixRequestRouter) -> list[int]:
    fleet = router._placement.fleet
    return [fleet.weight(name) for name in fleet.names]


def test_a_choice_is_counted_once_and_ended_once() -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        router.update_replicas([replica("a"), replica("b")])
        first, second = pending("1"), pending("2", chain=(7,))
        assert await chosen(router, first) == "a"
        assert await chosen(router, second) == "b"
        # Serve asks again when the replica did not take it.
        assert await chosen(router, first) == "a"
        assert weights(router) == [1, 1]
        one, other = (replica.replica_id for replica in router._replicas_list)
        router.on_request_completed(other, "1")
        assert weights(router) == [1, 1]
        for _ in range(2):
            router.on_request_completed(one, "1")
        assert weights(router) == [0, 1]

    play(scene)


def test_the_choice_for_a_client_that_leaves_before_it_is_sent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it leaves after Serve was given the choice, in the same turn of the loop."""
    leave: list[asyncio.Task[Any]] = []
    give = PrefixRequestRouter._fulfill_next_pending_request

    def give_too_late(router: PrefixRequestRouter, *choice: Any) -> None:
        give(router, *choice)
        leave.pop().cancel()

    async def scene(router: PrefixRequestRouter) -> None:
        router.update_replicas([replica("a")])
        request = pending("1")
        asking = asyncio.ensure_future(router._choose_replica_for_request(request))
        while not request.future.done():
            await asyncio.sleep(0)
        (one,) = router._replicas_list
        assert (await asking).replica_id == one.replica_id
        assert weights(router) == [1]
        router.on_request_completed(one.replica_id, "1")
        assert weights(router) == [0]
        monkeypatch.setattr(PrefixRequestRouter, "_fulfill_next_pending_request", give_too_late)
        late = pending("2")
        leave.append(asyncio.ensure_future(router._choose_replica_for_request(late)))
        (left,) = leave
        with pytest.raises(asyncio.CancelledError):
            await left
        assert late.future.done()
        assert not late.future.cancelled()
        assert weights(router) == [0]
        # No engine accepts it, so it waits, and leaves while it waits.
        router.update_replicas([])
        waiting = asyncio.ensure_future(router._choose_replica_for_request(pending("3")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        router.update_replicas([replica("a")])
        assert weights(router) == [0]

    play(scene)


def test_a_second_try_goes_elsewhere() -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        router.update_replicas([replica("a"), replica("b")])
        assert await chosen(router, pending("1")) == "a"
        assert await chosen(router, pending("1", left_out=("a",))) == "b"
        assert weights(router) == [0, 1]

    play(scene)


@pytest.mark.parametrize(
    ("stats", "status"), [({"accepting": True, "load": load(4)}, 429), ({"accepting": False}, 503)]
)
def test_a_request_that_no_engine_takes_is_answered(stats: dict[str, Any], status: int) -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        router.update_replicas([replica("a", **stats)])
        request = pending("1")
        # Serve goes on when it is given a candidate, and finds the answer there.
        assert len(await router.choose_replicas(router._replicas_list, request)) == 1
        with pytest.raises(ApiError) as refused:
            await request.future
        assert refused.value.status == status
        assert weights(router) == [4 if status == 429 else 0]

    play(scene)


def test_a_question_of_the_front_has_an_id_of_its_own() -> None:
    """Serve's router loses the second of two waiting requests of one id, and a front asks its first one within a
    client's request."""
    ids: list[str] = []

    class Answered:
        def remote(self) -> Awaitable[str]:
            ids.append(_get_serve_request_context()._internal_request_id)
            return asyncio.sleep(0, "answer")

    handle: Any = SimpleNamespace(about=Answered(), options=lambda **_: None)

    async def within_a_request() -> None:
        _serve_request_context.set(_RequestContext(_internal_request_id="the client's"))
        about: Any = await RayEngines(handle).about()
        assert about == "answer"
        assert _get_serve_request_context()._internal_request_id == "the client's"

    asyncio.run(within_a_request())
    assert ids == [""]


def test_what_is_flushed_or_gone_is_forgotten() -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        def told(**more: int) -> None:
            router.update_replicas([replica("a", accepting=True, load=load(**more)), replica("b")])

        told()
        assert await chosen(router, pending("1")) == "a"
        index = router._placement.index
        told(cached_pages=0)  # Asked before the prompt was cached.
        assert index.size("a") == len(CHAIN)
        told(cached_pages=5)
        told(cached_pages=0)
        assert index.size("a") == 0
        assert await chosen(router, pending("2")) == "b"
        told(weights_version=1, cached_pages=2)
        router.on_replica_actor_died(ReplicaID(unique_id="b", deployment_id=ENGINES))
        assert router._placement.fleet.names == ("a",)
        assert index.size("b") == 0

    play(scene)


def test_a_call_without_a_prompt_goes_to_the_lightest() -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        router.update_replicas([replica("a", accepting=True, load=load(2)), replica("b")])
        metadata = RequestMetadata(request_id="1", internal_request_id="1")
        assert await chosen(router, PendingRequest(args=[], kwargs={}, metadata=metadata)) == "b"
        assert await router.choose_replicas(router._replicas_list, None) == []

    play(scene)


def test_a_prompt_goes_where_an_engine_of_this_node_tells_that_it_is(tmp_path: Path) -> None:
    async def scene(router: PrefixRequestRouter) -> None:
        with closing(KvEvents(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again")) as events:
            events.listen(asyncio.get_running_loop())
            try:
                await told_of(router, events)
            finally:
                # Whoever listens to an engine ends with it; a context that is closed waits for its sockets.
                for name in [*router._subscriptions]:
                    _, listening = router._subscriptions[name]
                    router.on_replica_actor_died(ReplicaID(unique_id=name, deployment_id=ENGINES))
                    await asyncio.gather(listening, return_exceptions=True)

    async def told_of(router: PrefixRequestRouter, events: KvEvents) -> None:
        ids = tuple(range(1, 13))
        keys = tuple(page_keys(ids, 4, (0, 0)))
        events.publish([PagesStored(parent=None, keys=keys, tokens=ids)])
        endpoints = {"node": "", "live": f"ipc://{tmp_path}/live", "replay": f"ipc://{tmp_path}/again", "page_size": 4}
        router.update_replicas(
            [
                replica("a", accepting=True, load=load(), events=endpoints | {"node": "another"}),
                replica("b", accepting=True, load=load(1), events=endpoints),
            ]
        )
        assert [*router._subscriptions] == ["b"]
        while not router._subscriptions["b"][0].cache.is_right:
            await asyncio.sleep(0.01)
        assert await chosen(router, pending("1", prompt=Prompt.of_ids(ids, 4))) == "b"
        # By its text alone it is not known there.
        assert await chosen(router, pending("2", chain=(7,))) == "a"
        _, listening = router._subscriptions["b"]
        router.on_replica_actor_died(ReplicaID(unique_id="b", deployment_id=ENGINES))
        await asyncio.gather(listening, return_exceptions=True)
        assert not router._subscriptions

    play(scene)
