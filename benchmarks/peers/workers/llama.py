"""llama.cpp with one batch of sequences, without a server. Run: ``python -m ...llama FOLDER DTYPE``.

Runs in an environment with llama-cpp-python and gguf; the checkpoint is written as GGUF, once.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.workers.pipes import Generate, model_config, serve_batches

_ARCHITECTURE: Final = "qwen3"
_BATCH_TOKENS: Final = 512
_MOST_ROWS: Final = 32
_ROW_TOKENS: Final = 640


def written(folder: Path) -> Path:
    """Return the checkpoint as GGUF, in its own type, without a vocabulary, because prompts are token ids."""
    path = folder.parent / f"{folder.name}.gguf"
    if path.is_file():
        return path
    config = model_config(folder)
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, values, kind in _tensors(folder):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise RuntimeError(f"{name} has no name in GGUF")
        writer.add_tensor(target, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, values and type of each tensor. Vectors are widened: llama.cpp adds and multiplies them in fp32."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            raw = data[start + first : start + last]
            if entry["dtype"] == "F32":
                yield name, np.frombuffer(raw, np.float32).reshape(entry["shape"]), None
            elif len(entry["shape"]) == 1:
                yield name, (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32), None
            else:
                rows = entry["shape"][0]
                yield name, np.frombuffer(raw, np.uint8).reshape(rows, -1), gguf.GGMLQuantizationType.BF16


class Sequences:
    """A model, and a context in which each row of a batch is a sequence."""

    def __init__(self, path: Path, vocabulary: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = _MOST_ROWS * _ROW_TOKENS
        settings.n_seq_max = _MOST_ROWS
        settings.n_batch = settings.n_ubatch = _BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context for {path}")
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._vocabulary = vocabulary

    def generate(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Generate greedily: the prompts part by part, then all rows together, token by token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last = [self._prompt(row, prompt) for row, prompt in enumerate(prompts)]
        rows = len(prompts)
        for step in range(new_tokens - 1):
            places = [(last[row], len(prompts[row]) + step, row, True) for row in range(rows)]
            last = self._decode(places, rows)

    def _prompt(self, row: int, prompt: list[int]) -> int:
        last: list[int] = []
        for start in range(0, len(prompt), _BATCH_TOKENS):
            part = prompt[start : start + _BATCH_TOKENS]
            ends = start + len(part) == len(prompt)
            places = [(token, start + place, row, ends and place == len(part) - 1) for place, token in enumerate(part)]
            last = self._decode(places, int(ends))
        return last[0]

    def _decode(self, places: list[tuple[int, int, int, bool]], emitting: int) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(places)
        for index, (token, position, row, emits) in enumerate(places):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = emits
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not emitting:
            return []
        logits = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        chosen: list[int] = np.ctypeslib.as_array(logits, (emitting, self._vocabulary)).argmax(axis=1).tolist()
        return chosen


def load(folder: Path, dtype: str) -> Generate:
    """Make a function that generates greedily, all rows at once, in the checkpoint's type."""
    del dtype
    threads = len(os.sched_getaffinity(0))
    return Sequences(written(folder), model_config(folder)["vocab_size"], threads).generate


if __name__ == "__main__":
    serve_batches(load)
