"""A KV connector that a schedule controls: how many tokens it offers, how long transfers take, which loads fail.

It has the scheduler's role in vLLM. The machine (``machine.py``) plays the workers, and the device knows which KV came
from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

# Failed requests are not saved, and aborted ones only if that is configured.
_HANDED_ON = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class RequestedLoad(msgspec.Struct, frozen=True):
    """A load that vLLM requested: the tokens of a request from ``start`` to the end of ``token_ids``."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    is_async: bool
    # The block tables of all groups; ``block_ids`` is the first.
    tables: tuple[tuple[int, ...], ...] = ()


class RequestedLoads(KVConnectorMetadata):
    def __init__(self, loads: tuple[RequestedLoad, ...]) -> None:
        self.loads = loads


class ScheduledConnector(KVConnectorBase_V1, SupportsHMA):
    """Offers ``offered`` tokens of each prompt from outside; None while it does not know yet.

    ``saving`` are the requests whose blocks it keeps after their end. In ``kv_connector_extra_config``, ``is_async``
    says how it loads, and ``saves`` and ``saves_aborted`` whether it keeps the blocks of ended and of aborted requests.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.offered: int | None = extra["offered"]
        # The tokens offered to single requests instead, by rid.
        self.offered_to: dict[str, int | None] = {}
        self.saving: list[str] = []
        self._is_async: bool = extra["is_async"]
        self._is_consumer = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        self._saves: bool = extra["saves"]
        self._saved_ends = _HANDED_ON + (RequestStatus.FINISHED_ABORTED,) * extra["saves_aborted"]
        # States are loaded at the end of a block, but not after the last token, which is computed again.
        self._state_tokens: int = extra["state_tokens"]
        # In a fleet: the tokens of a prompt that another engine has, and the prompt's number there, by the rid of an
        # arriving request; the tokens by request, until they have blocks; the numbers of prompts whose KV is still
        # open; the requests that needed no tokens; and the blocks kept for other engines.
        self.is_remote = False
        self.coming: dict[str, tuple[int, int]] = {}
        self.promised: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.unused: list[str] = []
        self.kept: dict[str, tuple[int, ...]] = {}
        self._from: dict[str, int] = {}
        self._asked: list[RequestedLoad] = []

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Return True: a load brings the windows and states at its end."""
        return True

    def offer(self, tokens: int | None, rid: str = "") -> None:
        """Offer this many tokens of each later prompt, or of this request's; None: it does not know yet."""
        if rid:
            self.offered_to[rid] = tokens
        else:
            self.offered, self.offered_to = tokens, {}

    @property
    def is_unknown(self) -> bool:
        """Whether it does not know yet how much it offers to some request."""
        return None in (self.offered, *self.offered_to.values())

    def arrive(self, rid: str, request_id: str) -> None:
        """Note a request; in a fleet, another engine may have its prompt."""
        if rid in self.coming:
            self.promised[request_id], self.numbers[request_id] = self.coming.pop(rid)

    def take_unused(self) -> list[str]:
        """Return, once, the requests that need none of the KV kept for them."""
        unused, self.unused = self.unused, []
        return unused

    # -- called by vLLM's scheduler --

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Name the groups: a consumer reads the request's own blocks, with windows that no prefix cache keeps."""
        if self._is_consumer:
            return tuple(self._kv_cache_config.transfer_group_ids)
        return tuple(super().get_loaded_kv_cache_group_ids(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer tokens. A synchronous load leaves the last token to be computed, since sampling needs its result."""
        # An internal name is the rid with the step of its arrival.
        own = self.offered_to.get(request.request_id.rpartition("@")[0], self.offered)
        if own is None:
            return None, False
        offered = self.promised.get(request.request_id, own) if self.is_remote else own
        there = min(offered, request.num_prompt_tokens if self._is_async else request.num_tokens - 1)
        if self._state_tokens:
            there = min(there, request.num_tokens - 1) // self._state_tokens * self._state_tokens
        count = max(0, min(there, request.num_prompt_tokens) - num_computed_tokens)
        self._from[request.request_id] = num_computed_tokens
        return count, self._is_async and count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        start = self._from.pop(request.request_id, 0)
        if self.promised.pop(request.request_id, None) is not None and not num_external_tokens:
            self.unused.append(request.request_id)
        if num_external_tokens:
            tokens = tuple(request.all_token_ids[: start + num_external_tokens])
            tables = tuple(map(tuple, blocks.get_block_ids()))
            self._asked.append(RequestedLoad(request.request_id, start, tokens, tables[0], self._is_async, tables))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        del scheduler_output
        asked, self._asked = tuple(self._asked), []
        return RequestedLoads(asked)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of an ended request until they are saved, if requests that end in this way are saved."""
        self._from.pop(request.request_id, None)
        if self.promised.pop(request.request_id, None) is not None:
            self.unused.append(request.request_id)
        if not self._saves or request.status not in self._saved_ends:
            return False, None
        self.saving.append(request.request_id)
        if self.is_remote:
            self.kept[request.request_id] = tuple(block_ids)
        return True, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        return True

    def _of_workers(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the machine loads and saves")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _of_workers
