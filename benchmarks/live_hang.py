"""A live vLLM that hangs, and the report of ``scripted stuck`` on it: a failed load of KV waits for itself.

`.venv-vllm/bin/python -m benchmarks.live_hang` starts vLLM's server with a KV connector whose loads fail, and with
`kv_load_failure_policy=recompute`: the defect "A failed load waits for itself" of benchmarks/tables/defects.md. One
client asks, and `scripted stuck` is asked for the running server's folder.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Final

import aiohttp
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from benchmarks.live_flight import Server, Turn
from benchmarks.live_stuck import SHAPE, lines_of_stuck, print_stuck

_BLOCK: Final = 32
# For an answer; a server that hangs gives none.
_WAITS_S: Final = 20.0


class Asked(KVConnectorMetadata):
    """A step's loads: each request with the blocks that it loads into."""

    def __init__(self, loads: dict[str, list[int]]) -> None:
        self.loads = loads


class FailingLoads(KVConnectorBase_V1):
    """A connector that offers the whole blocks of each prompt from outside and fails to load them."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._loads: dict[str, list[int]] = {}
        self._over: set[str] = set()
        self._failed: set[int] = set()

    # -- the scheduler's side --

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        whole = request.num_tokens // _BLOCK * _BLOCK
        return max(0, whole - num_computed_tokens), whole > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loads[request.request_id] = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: Any) -> Asked:
        del scheduler_output
        asked, self._loads = Asked(self._loads), {}
        return asked

    # -- the worker's side --

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Asked), "this connector makes it"
        self._over |= set(metadata.loads)
        self._failed |= {block for blocks in metadata.loads.values() for block in blocks}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        del finished_req_ids
        over, self._over = self._over, set()
        return None, over or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: loads fail at once."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""


def words() -> tuple[str, ...]:
    """Return the server's options: memory in which a load and its reservation do not fit side by side."""
    transfer = {
        "kv_connector": FailingLoads.__name__,
        "kv_connector_module_path": "benchmarks.live_hang",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    memory = ("--num-gpu-blocks-override", "9", "--max-model-len", "256")
    return (*memory, "--kv-transfer-config", json.dumps(transfer))


async def stuck(server: Server, folder: Path) -> list[str]:
    """Request the answer to one prompt of five blocks; return the report while its client still waits."""
    body: dict[str, Any] = {"model": SHAPE, "prompt": list(range(40, 40 + 5 * _BLOCK)), "stream": True, "max_tokens": 4}
    server.body = lambda chance: body  # type: ignore[method-assign]  # noqa: ARG005
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(server.ask(session, random.Random(0), Turn(0)))  # noqa: S311 - nothing is secret
        await asyncio.wait([asked], timeout=_WAITS_S)
        lines = await lines_of_stuck(folder)
        asked.cancel()
    return lines


def main() -> None:
    print_stuck("vllm", 30493, stuck, words(), {"PYTHONPATH": str(Path(__file__).parents[1])})


if __name__ == "__main__":
    main()
