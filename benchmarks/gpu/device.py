"""The device itself: its name, its memory bandwidth, the page sizes that its attention kernel supports.

The other measurements are compared with these numbers.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import torch
import transformers

from benchmarks.checkpoints import SHAPES
from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting
from engine.model.varlen import AttentionShape, why_not_shape

__all__ = ["machine", "measure_device", "measured_bandwidth", "read_bytes"]

_COPIES: Final = 20
_PAGES: Final = (16, 32, 64, 128, 256)
_SMI: Final = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def machine() -> dict[str, str]:
    """Return GPU, driver and versions without making a device context, because this process starts the others."""
    named = {
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
    if shutil.which(_SMI[0]) is None:
        return {"GPU": "none", **named}
    answer = subprocess.run(_SMI, check=False, capture_output=True, text=True, timeout=30.0)  # noqa: S603 - fixed words
    gpus = answer.stdout.strip().splitlines() or [answer.stderr.strip() or "none"]
    return {"GPU": "; ".join(gpus), "CUDA of torch": str(torch.version.cuda), **named}


def measured_bandwidth(setting: Setting) -> float:
    """Measure the bytes a second that a copy within the device's memory reads and writes."""
    source = torch.ones(setting.copy_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * setting.copy_bytes * _COPIES / _seconds(setting, lambda: [target.copy_(source) for _ in range(_COPIES)])


def read_bytes(setting: Setting) -> tuple[int, int]:
    """Return the bytes that a decode step reads: of the weights, including a tied embedding, and of one token's KV."""
    config = transformers.AutoConfig.from_pretrained(setting.folder)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    every = {id(parameter): parameter.numel() for parameter in model.parameters()}
    if not config.tie_word_embeddings:
        every.pop(id(model.get_input_embeddings().weight))
    size = torch.empty(0, dtype=getattr(torch, setting.dtype)).element_size()
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return sum(every.values()) * size, kv * size


def measure_device(setting: Setting) -> list[Table]:
    """Measure the bandwidth, and try the attention kernel with each page size."""
    copied = Table(title="Memory", columns=("copy", "GB/s"))
    copied.rows.append((f"{setting.copy_bytes >> 20} MiB, read and written", measured_bandwidth(setting) / 1e9))
    on_cuda = setting.device.startswith("cuda")
    taken = Table(
        title=f"torch's variable-length attention, {setting.dtype}, heads of shape {setting.shape}",
        columns=("page_size", "taken", "why not"),
        needs="" if on_cuda else "CUDA",
    )
    shape = SHAPES[setting.shape]
    for page_size in _PAGES:
        if not on_cuda:
            taken.rows.append((page_size, None, None))
            continue
        attention = AttentionShape(
            getattr(torch, setting.dtype),
            heads=shape["num_attention_heads"],
            kv_heads=shape["num_key_value_heads"],
            head_dim=shape["head_dim"],
            page_size=page_size,
        )
        reason = why_not_shape(torch.device(setting.device), attention)
        taken.rows.append((page_size, "no" if reason else "yes", reason or ""))
    return [copied, taken]


def _seconds(setting: Setting, work: Callable[[], object]) -> float:
    """Return the wall time of a function until the device is done."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if setting.device.startswith("cuda") else lambda: None
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began
