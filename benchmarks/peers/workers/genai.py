"""OpenVINO GenAI's continuous batching, without a server. Run: ``python -m ...genai FOLDER DTYPE``.

Runs in an environment with openvino-genai and optimum-intel; the latter exports the model, once a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino_genai

from benchmarks.peers.workers.pipes import Generate, serve_batches

_HINTS: Final = {"float32": "f32", "bfloat16": "bf16"}
# Weights of 16 bits keep 16 bits; the values are random anyway.
_EXPORTED: Final = {"float32": "fp32", "bfloat16": "fp16"}
_BLOCK_TOKENS: Final = 32
_KV_TOKENS: Final = 16_384
_MOST_TOKENS: Final = 4096


def exported(folder: Path, dtype: str) -> Path:
    """Return the model in OpenVINO's format, beside the checkpoint; export it the first time."""
    place = folder.parent / f"{folder.name}-genai"
    if not (place / "openvino_model.xml").is_file():
        from optimum.exporters.openvino import main_export
        from optimum.intel.openvino import OVConfig

        main_export(
            str(folder),
            output=place,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype=_EXPORTED[dtype]),
            convert_tokenizer=False,
        )
    return place


def load(folder: Path, dtype: str) -> Generate:
    """Make a function that generates greedily, batched by GenAI's own scheduler."""
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.num_kv_blocks = _KV_TOKENS // _BLOCK_TOKENS
    scheduling.max_num_batched_tokens = _MOST_TOKENS
    scheduling.enable_prefix_caching = True
    hint = _HINTS[dtype]
    properties = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(exported(folder, dtype)), scheduling, "CPU", properties)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = new_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        ids = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [settings] * len(ids))
        counts = {len(result.m_generation_ids[0]) for result in results}
        if counts != {new_tokens}:
            raise RuntimeError(f"each request must give {new_tokens} tokens, got {counts}")

    return generate


if __name__ == "__main__":
    serve_batches(load)
