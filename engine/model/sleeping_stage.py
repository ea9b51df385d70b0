"""A sleeping stage: the facts that need no weights and KV, and the check of its files when it wakes.

Owns only the memory of its LoRAs. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.core.errors import CheckpointError, IntegrityError
from engine.core.limits import Limits
from engine.core.plan import Segment
from engine.model.backend import ComputingStage
from engine.model.batch import Batch
from engine.model.file_pages import give_back_garbage
from engine.model.kv_pool import KVPool
from engine.model.prompt_logprobs import ScoreTaker

# The names, sizes in bytes and modification times of a folder's weight files.
FileStates = tuple[tuple[str, int, int], ...]


class AsleepStage:
    """Replaces a stage, with its facts, its LoRAs and a pool of one page; see ``ComputingStage``."""

    is_lean = False

    def __init__(self, stage: ComputingStage, limits: Limits) -> None:
        self.backend, self.facts, self.device, self.lora = stage.backend, stage.facts, stage.device, stage.lora
        self.pool = KVPool(limits, layers=0, kv_heads=0, head_dim=0, dtype=torch.uint8, device=self.device)

    def batch(self, segments: Sequence[Segment]) -> Batch:
        raise IntegrityError(f"a sleeping stage must not compute, got {len(segments)} segments")

    def forward(self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None) -> torch.Tensor:
        del hidden, take_scored
        raise IntegrityError(f"a sleeping stage must not compute, got {batch.tokens} tokens")

    def take_pool(self, pool: KVPool) -> None:
        raise IntegrityError(f"a sleeping stage must keep its pool, got {pool}")


def give_back(device: torch.device) -> None:
    """Return freed memory to the system; allocators would keep it."""
    give_back_garbage()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def states_of(folder: Path) -> FileStates:
    """Read the current states of a folder's weight files."""
    found = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return tuple([(name, about.st_size, about.st_mtime_ns) for name, about in found])


def require_as_read(folder: Path, states: FileStates) -> None:
    """Raise CheckpointError if a folder's weight files have changed since they were read."""
    if states_of(folder) != states:
        raise CheckpointError(
            f"a stage must wake with the weights that it had, but the files in {folder} have changed since it read "
            "them; POST /update_weights_from_disk with the folder of the weights to use"
        )
