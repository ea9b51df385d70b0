"""LoRAs of the embedded model: folders in peft's format, with seeded random weights, written at first use.

Never imports torch. Each is an ordinary folder, loaded by the same code as any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from engine.core.limits import EMBEDDED_FACTS
from engine.model.embedded import kept_folder, projection_shapes, write_json

_RANK: Final = 4
_ALPHA: Final = 8
# Standard deviation of the two matrices relative to 1/sqrt(fan in): large enough to change greedy outputs.
_GAIN: Final = 0.7


def embedded_lora_folder(seed: int) -> Path:
    """Return the folder of the LoRA for ``seed``, written at first use. Raises CheckpointError if that fails."""
    return kept_folder(f"embedded-lora-{seed}", Path(__file__), lambda folder: write_embedded_lora(folder, seed))


def write_embedded_lora(folder: Path, seed: int) -> None:
    """Write configuration and weights into an existing folder; equal seeds give equal bytes."""
    modules = sorted(name.rpartition(".")[2] for name in projection_shapes())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": EMBEDDED_FACTS.name,
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)
    (folder / "adapter_model.safetensors").write_bytes(save(_weights(seed), metadata={"format": "pt"}))


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.Generator(np.random.PCG64([seed, 1]))

    def draw(rows: int, columns: int) -> NDArray[np.float32]:
        unit = generator.random((rows, columns)) * 2.0 - 1.0
        return np.asarray(unit * (_GAIN * (3.0 / columns) ** 0.5), np.float32)

    weights: dict[str, NDArray[np.float32]] = {}
    for layer in range(EMBEDDED_FACTS.num_layers):
        for name, (rows, columns) in projection_shapes().items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = draw(_RANK, columns)
            weights[f"{prefix}.lora_B.weight"] = draw(rows, _RANK)
    return weights
