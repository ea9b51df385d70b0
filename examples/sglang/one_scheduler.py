"""SGLang's own scheduler on a CPU, without a server: its constructor, over a random model of one layer."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.managers import scheduler as managers_scheduler
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def new_scheduler(**more: Any) -> Scheduler:
    """Nothing is downloaded; ``more`` are arguments of the server."""
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
        max_total_tokens=48,
        max_running_requests=4,
        watchdog_timeout=1e9,
        **more,
    )
    with mock.patch.object(tempfile, "tempdir", folder):
        ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    # What it publishes of its load would lie in a file of shared memory that nothing removes.
    with mock.patch.object(managers_scheduler, "create_load_snapshot_writer", return_value=None):
        return Scheduler(args, ports)


def request(rid: str, prompt: int) -> TokenizedGenerateReqInput:
    """As the front end sends it."""
    sampling = SamplingParams(max_new_tokens=8)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", range(1, prompt + 1)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )


def without_a_model(scheduler: Scheduler) -> Scheduler:
    """Its forward pass is left out, because no token depends on it."""

    def forward(batch: Any, **_: Any) -> GenerationBatchResult:
        tokens = torch.full((len(batch.reqs),), 7)
        return GenerationBatchResult(logits_output=None, next_token_ids=tokens, can_run_cuda_graph=False)

    scheduler.model_worker = SimpleNamespace(forward_batch_generation=forward)
    return scheduler


def turn(scheduler: Any, *messages: Any) -> list[int]:
    """One of ``event_loop_normal``; returns how many tokens of each request it computes."""
    scheduler.process_input_requests(list(messages))
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return [] if batch is None else list(batch.extend_lens or [1] * len(batch.reqs))
