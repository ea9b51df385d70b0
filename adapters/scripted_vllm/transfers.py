"""The connector's side in vLLM's workers: loads arrive or fail, saves end, and each is reported in a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from vllm.v1.outputs import KVConnectorOutput

from scripted.sdk import Load, Signal, Window
from scripted_vllm.actions import ENDED, FAIL, HOLD, OFFER, RELEASE, UNKNOWN
from scripted_vllm.config import VllmSettings
from scripted_vllm.connector import RequestedLoad
from scripted_vllm.ids import rid_of
from scripted_vllm.images import seen_in
from scripted_vllm.kv_check import NULL_BLOCK
from scripted_vllm.runner_view import tables_of_groups

# vLLM 0.32 and later.
_TAKES_NAMES: Final = "failed_recving" in KVConnectorOutput.__dataclass_fields__


class _Transfer(msgspec.Struct, frozen=True):
    """A load, or the save of an ended request, which ends in step ``due``."""

    request_id: str
    due: int
    load: RequestedLoad | None = None


class Transfers:
    """The transfers of the scheduler's connector; without a connector there are none.

    ``under_way`` are asynchronous transfers. Workers report a step's ended transfers in the result of the next plan;
    ``arrived`` are the loads of this step.
    """

    def __init__(self, settings: VllmSettings, connector: Any) -> None:
        self.under_way: list[_Transfer] = []
        self.arrived: tuple[Load, ...] = ()
        self.holds = False
        # Whether a transfer ends in this step.
        self.ended = False
        self._connector = connector
        self._steps = settings.kv_transfer_steps
        self._block_size = settings.kv_block_size
        self._settings = settings
        # With several groups vLLM accepts only the request's name, and only for an asynchronous load.
        self._by_name = settings.has_groups
        self._may_fail = not self._by_name or (settings.kv_connector == "async" and _TAKES_NAMES)
        self._now = 0
        # The first block that the next load fails to bring.
        self._failing: int | None = None
        # The same for the next load of a request, and the requests whose next transfer ends although all are held.
        self._failing_of: dict[str, int] = {}
        self._let_go: set[str] = set()
        # In a fleet, the other engine ends transfers: by request, and whether everything was lost.
        self.is_remote = False
        self._over: dict[str, bool] = {}
        self._asked: list[RequestedLoad] = []

    def take_asked(self) -> list[RequestedLoad]:
        """Return the loads that began, which the fleet carries."""
        asked, self._asked = self._asked, []
        return asked

    @property
    def is_unknown(self) -> bool:
        return self._connector is not None and bool(self._connector.is_unknown)

    @property
    def go_on(self) -> bool:
        if self.is_remote or self.holds:
            return any(map(self._is_over, self.under_way))
        return bool(self.under_way)

    def begin(self, step: int) -> None:
        self._now = step
        self.arrived = ()
        self.ended = False

    def take(self, signal: Signal) -> None:
        if self._connector is None:
            return
        if signal.name == FAIL and signal.rid:
            self._failing_of[signal.rid] = signal.value
        elif signal.name == FAIL:
            self._failing = signal.value
        elif signal.name == ENDED:
            self._over[signal.rid] = bool(signal.value)
        elif signal.name == OFFER:
            to = (signal.rid,) if signal.rid else ()
            self._connector.offer(None if signal.value == UNKNOWN else signal.value, *to)
        elif signal.name == RELEASE and signal.rid:
            self._let_go.add(signal.rid)
        else:
            self.holds = signal.name == HOLD

    def run(self, plan: Any, requests: Mapping[str, Any]) -> KVConnectorOutput | None:
        """Take a plan of these requests; return the transfers that its result reports."""
        if self._connector is None:
            return None
        saving, self._connector.saving = self._connector.saving, []
        self.under_way += [_Transfer(request_id, self._now + self._steps) for request_id in saving]
        over = [one for one in self.under_way if self._is_over(one)]
        asked = [
            msgspec.structs.replace(load, token_ids=seen_in(load.token_ids, requests[load.request_id].mm_features))
            for load in plan.kv_connector_metadata.loads
        ]
        begun = [_Transfer(load.request_id, self._now + self._steps, load) for load in asked if load.is_async]
        # Workers may complete a load in the plan that requests it.
        over += [one for one in begun if rid_of(one.request_id) in self._let_go]
        self._let_go -= {rid_of(one.request_id) for one in over}
        self.under_way = [one for one in (*self.under_way, *begun) if one not in over]
        self.ended = bool(over)
        if self.is_remote:
            self._asked += asked
        loads = [one.load for one in over if one.load is not None] + [load for load in asked if not load.is_async]
        self.arrived = tuple([self._arrival(load, requests.get(load.request_id)) for load in loads])
        for one in over:
            self._over.pop(one.request_id, None)
            if self.is_remote and one.load is None:
                del self._connector.kept[one.request_id]
        return KVConnectorOutput(
            finished_sending={one.request_id for one in over if one.load is None},
            finished_recving={one.request_id for one in over if one.load is not None},
            **self._failed(loads),
        )

    def _failed(self, loads: Sequence[RequestedLoad]) -> dict[str, set[Any]]:
        """Report what is lost of the loads that arrived; two of them may be of requests that share a client's name."""
        if not self._by_name:
            return {"invalid_block_ids": {block for load in self.arrived for block in load.missing}}
        lost = {load.request_id for load, arrived in zip(loads, self.arrived, strict=True) if arrived.missing}
        return {"failed_recving": lost} if lost else {}

    def _is_over(self, one: _Transfer) -> bool:
        if self._let_go and rid_of(one.request_id) in self._let_go:
            return True
        if self.holds:
            return False
        return one.request_id in self._over if self.is_remote else one.due <= self._now

    def _arrival(self, load: RequestedLoad, request: Any) -> Load:
        first, last = load.start // self._block_size, -(-len(load.token_ids) // self._block_size)
        missing: tuple[int, ...] = ()
        block = self._failing_of.pop(rid_of(load.request_id), None)
        if self._over.get(load.request_id):
            missing = load.block_ids[first:last]
        elif block is None and self._may_fail:
            block, self._failing = self._failing, None
        if block is not None and self._may_fail and not missing:
            missing = load.block_ids[first if self._by_name else max(first, min(block, last - 1)) : last]
        tables = tables_of_groups(load.tables, self._settings)
        tables["windows"] = tuple([self._for_the_last(one, len(load.token_ids)) for one in tables["windows"]])
        if self._settings.swa_bounded_replay and self._settings.kv_role != "kv_consumer":
            # A store of prefixes has no windows for these models.
            tables["windows"] = ()
        return Load(
            rid=rid_of(load.request_id),
            start=load.start,
            token_ids=load.token_ids,
            block_ids=load.block_ids,
            missing=missing,
            late=request is None or request.is_finished(),
            **tables,
        )

    def _for_the_last(self, window: Window, end: int) -> Window:
        """Return a window which, if the table has blocks for it, begins with what the last token reads.

        That token is computed again after the load of a whole prompt.
        """
        first = window.begins(end - 1)
        if window.block_ids[first // self._block_size] == NULL_BLOCK:
            return window
        return msgspec.structs.replace(window, tokens=end + 1 - first, is_chunk=False)
