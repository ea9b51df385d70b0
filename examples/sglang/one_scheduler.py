"""SGLang's own scheduler on a CPU, without a server: its constructor, over a random model of one layer."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
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
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
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
