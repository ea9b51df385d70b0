"""Runs SGLang's scheduler on its own event loop with the messages of each turn. Standalone tests contain this."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers import scheduler as managers_scheduler
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

# Its end-of-sequence token occurs in no output.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "eos_token_id": 255,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1),
}


def new_scheduler(settings: Any) -> Scheduler:
    """Make a scheduler on the CPU, over a random one-layer model."""
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
        watchdog_timeout=1e9,
        page_size=settings.page_size,
        max_total_tokens=settings.max_total_tokens,
        max_running_requests=settings.max_running_requests,
        chunked_prefill_size=settings.chunked_prefill_size,
        context_length=settings.context_length,
        schedule_policy=settings.schedule_policy,
        schedule_conservativeness=settings.schedule_conservativeness,
        disable_overlap_schedule=settings.disable_overlap_schedule,
        disable_radix_cache=settings.disable_radix_cache,
        enable_mixed_chunk=settings.enable_mixed_chunk,
        enable_priority_scheduling=settings.enable_priority_scheduling,
        max_queued_requests=settings.max_queued_requests,
    )
    with mock.patch.object(tempfile, "tempdir", folder):
        ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    # Its published load would stay behind in a shared memory file.
    with mock.patch.object(managers_scheduler, "create_load_snapshot_writer", return_value=None):
        return Scheduler(args, ports)


def request(
    rid: str,
    prompt: Iterable[int],
    new: int,
    priority: int | None = None,
    stop: Iterable[int] = (),
    least: int = 0,
    tokenizer: Any = None,
) -> TokenizedGenerateReqInput:
    """Make a request as the front end sends it."""
    sampling = SamplingParams(max_new_tokens=new, min_new_tokens=least, stop_token_ids=set(stop) or None)
    sampling.normalize(tokenizer)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        priority=priority,
    )


class Turns:
    """Stands in for sockets and forward pass: supplies each turn's messages, and keeps the scheduler's answers."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = [[]]
        # Each request's tokens in each batch, the batches before each turn, the slots that batches write, each
        # request's end, and the answer to each flush.
        self.batches: list[dict[str, int]] = []
        self.before: list[int] = []
        self.written: set[int] = set()
        # Requests that compute a position again, and how far each has come; and requests that read a slot that no batch
        # has written since the cache was last emptied.
        self.again: list[str] = []
        self.stale: list[str] = []
        self._valid: set[int] = set()
        self._reached: dict[tuple[str, int], int] = {}
        self.ends: dict[str, str] = {}
        self.flushes: list[bool] = []

    def say(self, message: Any) -> None:
        self.messages[-1].append(message)

    def take(self, turns: int = 1) -> None:
        self.messages += [[] for _ in range(turns)]

    def come(self) -> list[Any]:
        return self.messages.pop(0)

    def since(self, turn: int) -> list[dict[str, int]]:
        """Return the batches since the messages of a turn."""
        return self.batches[self.before[turn] :]

    @staticmethod
    def load(scheduler: Any) -> dict[str, Any]:
        """Return what a router hears of the load, without its time."""
        report: dict[str, Any] = scheduler.load_inquirer.get_loads().to_dict()
        return {**report, "timestamp": 0}

    def run(self, scheduler: Any) -> None:
        """Run all turns on the scheduler's own loop."""

        def receive(local_reqs: Any = ()) -> list[Any]:
            scheduler.gracefully_exit = len(self.messages) == 1
            self.before.append(len(self.batches))
            return [*local_reqs, *self.come()]

        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        front_end = SimpleNamespace(send_output=self._hear)
        scheduler.ipc_channels = SimpleNamespace(send_to_tokenizer=front_end, send_to_detokenizer=front_end)
        scheduler.output_streamer.send_to_detokenizer = front_end
        scheduler.model_worker = SimpleNamespace(forward_batch_generation=self._forward)
        with torch.no_grad():
            scheduler.run_event_loop()

    def _forward(self, batch: Any, **_: Any) -> GenerationBatchResult:
        lengths = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        slots, ends, rows = batch.out_cache_loc.tolist(), batch.seq_lens.tolist(), batch.req_pool_indices.tolist()
        self.written.update(slots)
        self._valid.update(slots)
        for req, length, end, row in zip(batch.reqs, lengths, ends, rows, strict=True):
            if not self._valid.issuperset(batch.req_to_token_pool.req_to_token[row, :end].tolist()):
                self.stale.append(req.rid)
            # A retraction takes back what was computed.
            life = req.rid, req.retraction_count
            if end - length < self._reached.get(life, 0):
                self.again.append(req.rid)
            self._reached[life] = end
        self.batches.append({req.rid: length for req, length in zip(batch.reqs, lengths, strict=True)})
        # No token ends a request, so all of them may be the same.
        tokens = torch.full((len(batch.reqs),), 7)
        return GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False)

    def _hear(self, output: Any, recv_obj: Any = None) -> None:
        match type(output).__name__:
            case "BatchTokenIDOutput":
                reasons = zip(output.rids, output.finished_reasons, strict=True)
                self.ends |= {rid: reason["type"] for rid, reason in reasons if reason is not None}
            case "AbortReq":
                self.ends[output.rid] = "abort"
            case "FlushCacheReqOutput":
                self.flushes.append(output.success)
                self._valid = set() if output.success else self._valid
            case "ReleaseMemoryOccupationReqOutput":
                # Without tags all memory is released.
                self._valid = set() if "kv_cache" in (recv_obj.tags or ["kv_cache"]) else self._valid
