"""The setting of a run: device, checkpoint's shape, batches. A dry run has small ones.

Handed from the run to each part's process as JSON; owns no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoints import vocabulary_of
from benchmarks.one_process import Engine, prompts_of
from engine.core.config import EngineConfig

__all__ = ["Setting"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """``shape`` is a shape of ``benchmarks.checkpoints``; every paged kernel supports this page size."""

    dry_run: bool = False
    device: str = "cuda"
    shape: str = "M"
    dtype: str = "bfloat16"
    page_tokens: int = 256
    context_tokens: int = 2048
    batches: tuple[int, ...] = (1, 8, 32, 128)
    prompt_tokens: int = 128
    new_tokens: int = 64
    long_prompts: tuple[int, ...] = (512, 1536)
    rounds: int = 3
    clients: tuple[int, ...] = (1, 8, 32)
    stages: tuple[int, ...] = (1, 4)
    copy_bytes: int = 1 << 30
    checkpoint: str = ""

    @classmethod
    def small(cls) -> Setting:
        """Return the setting of a dry run on the CPU: the same paths over a tiny model."""
        return cls(
            dry_run=True,
            device="cpu",
            shape="S",
            page_tokens=16,
            context_tokens=64,
            batches=(1, 3),
            prompt_tokens=12,
            new_tokens=6,
            long_prompts=(40,),
            rounds=1,
            clients=(2,),
            stages=(1, 2),
            copy_bytes=1 << 22,
        )

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.checkpoint)

    @property
    def engine_values(self) -> dict[str, Any]:
        """The fields of a configuration that every engine of the run has."""
        return {
            "model": str(self.folder),
            "device": self.device,
            "backend": "torch",
            "dtype": self.dtype,
            "page_size": self.page_tokens,
            "max_total_tokens": self.kv_tokens,
            "context_length": self.context_tokens,
            "max_running_requests": max(self.batches),
        }

    def engine(self, *, lean: bool = True, early: bool | None = None, **values: Any) -> Engine:
        """Make an engine with all layers in this process. ``values`` are further fields of its configuration."""
        given: dict[str, Any] = {"chunked_prefill_size": self.context_tokens, "radix_cache": False}
        return Engine(EngineConfig(**(self.engine_values | given | values)), lean=lean, early=early)

    def prompts(self, rows: int, tokens: int, seed: int) -> list[list[int]]:
        """Draw random words, the same for each seed."""
        return prompts_of(rows, tokens, self.vocabulary, seed)

    @property
    def vocabulary(self) -> int:
        """The ids below this number are words, and none ends a text."""
        return vocabulary_of(self.shape) - 2

    @property
    def kv_tokens(self) -> int:
        """Room for the largest batch, each row in whole pages, and for a long prompt."""
        row = self.prompt_tokens + self.new_tokens + self.page_tokens
        return max(self.batches) * (-(-row // self.page_tokens)) * self.page_tokens + 2 * self.context_tokens
