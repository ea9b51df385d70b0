"""Aborts that SGLang 0.5.23's prefill and decode servers lose or do not tell one another, and rooms that stay forever.

Two schedulers with their own KV managers of the Mooncake backend, over their own sockets; only the RDMA engine is
replaced, by copies within the process. Each test fails. `pytest test_transfers.py` needs SGLang and a CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import socket
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.distributed import bootstrap
from sglang.srt.managers import scheduler as managers_scheduler
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

# Their time limits are 300 s.
PATIENCE_S = 10.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1),
}


class Server:
    """A scheduler with a role, which takes a turn of its own loop when it is told to; ``ended`` are its requests."""

    def __init__(self, role: str, port: int) -> None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        args = ServerArgs(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            chunked_prefill_size=8,
            max_total_tokens=64,
            max_running_requests=4,
            watchdog_timeout=1e9,
            num_reserved_decode_tokens=4,
            disaggregation_mode=role,
            disaggregation_transfer_backend="mooncake",
            disaggregation_bootstrap_port=port,
            disaggregation_decode_retraction_backup="cpu_tensor",
        )
        with mock.patch.object(tempfile, "tempdir", folder):
            ports = PortArgs.init_new(args)
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        self.context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
        self._address = "127.0.0.1", port
        with runtime_context.use_context(self.context):
            self.scheduler: Any = Scheduler(args, ports)
        self.ended: set[str] = set()
        front_end = SimpleNamespace(send_output=self._hear)
        self.scheduler.ipc_channels = SimpleNamespace(send_to_tokenizer=front_end, send_to_detokenizer=front_end)
        self.scheduler.output_streamer.send_to_detokenizer = front_end

    def share_groups(self, **_: Any) -> None:
        groups = self.context.parallel._stamp  # noqa: SLF001 - where SGLang keeps them
        runtime_context.get_parallel()._stamp.update(groups)  # noqa: SLF001 - as above

    def turn(self, *messages: Any) -> None:
        def receive(local_reqs: Any = ()) -> list[Any]:
            self.scheduler.gracefully_exit = True
            return [*local_reqs, *messages]

        self.scheduler.gracefully_exit = False
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        with runtime_context.use_context(self.context), torch.no_grad():
            self.scheduler.run_event_loop()

    def request(self, rid: str, room: int) -> TokenizedGenerateReqInput:
        sampling = SamplingParams(max_new_tokens=30)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", range(1, 15)),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=True,
            bootstrap_host=self._address[0],
            bootstrap_port=self._address[1],
            bootstrap_room=room,
        )

    def _hear(self, output: Any, recv_obj: Any = None) -> None:
        del recv_obj
        if hasattr(output, "finished_reasons"):
            self.ended |= {rid for rid, why in zip(output.rids, output.finished_reasons, strict=True) if why}
        elif isinstance(output, AbortReq):
            self.ended.add(output.rid)


def copy(_: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
    for source, target, length in zip(sources, targets, lengths, strict=True):
        ctypes.memmove(target, source, length)
    return 0


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server. Process groups are made for the first one; the other is told them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = SimpleNamespace(get_session_id=lambda: f"127.0.0.1:{port}", batch_transfer_sync=copy)
    manager = conn.MooncakeKVManager
    with (
        mock.patch.object(manager, "init_engine", lambda self: setattr(self, "engine", engine)),
        mock.patch.object(manager, "register_buffer_to_engine"),
        # These need a GPU.
        mock.patch.object(conn.MooncakeKVSender, "supports_host_tensor_indices", new=False),
        mock.patch.object(torch.cuda, "Event"),
        mock.patch.object(bootstrap, "maybe_init_shared_mooncake_transfer_engine"),
        mock.patch.object(managers_scheduler, "create_load_snapshot_writer", return_value=None),
    ):
        addresses = conn.MooncakeKVBootstrapServer("127.0.0.1", port)
        prefill = Server("prefill", port)
        with mock.patch.object(bootstrap, "init_parallel_runtime", prefill.share_groups):
            decode = Server("decode", port)
        # The threads of both look for a context at any time.
        with runtime_context.use_context(prefill.context):
            yield prefill, decode
        addresses.close()


def until(condition: Callable[[], bool], *servers: Server) -> bool:
    """They take turns until it holds; whether it did before patience ended."""
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        for server in servers:
            server.turn()
        time.sleep(0.01)
    return condition()


def shake_hands(prefill: Server, decode: Server, rid: str, room: int) -> Any:
    """Until the decode server has said where the KV is to be written. Returns the prefill server's manager."""
    manager = prefill.scheduler.disagg_prefill_bootstrap_queue.kv_manager
    decode.turn(decode.request(rid, room))
    assert until(lambda: room in manager.transfer_infos, decode)
    return manager


def test_the_prefill_server_is_told_of_an_abort_at_the_first_contact(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    # Nothing was asked of the prefill server before.
    decode.turn(decode.request("b", 2), AbortReq(rid="b"))
    prefill.turn(prefill.request("b", 2))
    assert until(lambda: "b" in decode.ended, prefill, decode)
    assert until(lambda: "b" in prefill.ended, prefill, decode)


def test_the_decode_server_is_told_of_an_abort(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    shake_hands(prefill, decode, "a", 1)
    prefill.turn(prefill.request("a", 1), AbortReq(rid="a"))
    assert until(lambda: "a" in prefill.ended, prefill)
    assert until(lambda: "a" in decode.ended, prefill, decode)


def test_the_room_of_an_aborted_request_is_forgotten(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    manager = shake_hands(prefill, decode, "c", 3)
    prefill.turn(prefill.request("c", 3))
    prefill.turn(AbortReq(rid="c"))
    decode.turn(AbortReq(rid="c"))
    assert until(lambda: "c" in prefill.ended and "c" in decode.ended, prefill, decode)
    tables = ("request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len")
    assert until(lambda: not any(3 in getattr(manager, table) for table in tables), prefill, decode)


def test_an_abort_reaches_what_a_pause_retracted(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    shake_hands(prefill, decode, "d", 4)
    prefill.turn(prefill.request("d", 4))
    assert until(lambda: any(req.rid == "d" for req in decode.scheduler.running_batch.reqs), prefill, decode)
    decode.turn(PauseGenerationReqInput(mode="retract"))
    decode.turn(AbortReq(rid="d"))
    assert until(lambda: "d" in decode.ended, decode)
