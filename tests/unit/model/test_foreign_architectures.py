"""Architectures that compute in a way of their own are refused when a stage starts, in one line, never served wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from chained_stages import ChainedStages, limits_for
from tiny_checkpoints import SHAPE, WINDOW

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.model import attention
from engine.model.checkpoint import SERVED

TOKENS = {"bos_token_id": 0, "pad_token_id": 0}
REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], int, str]] = {
    "a mask of its own": (lambda: transformers.DogeConfig(**SHAPE), 1, "an architecture-specific mask"),
    "a norm before its layers": (
        lambda: transformers.NanoChatConfig(**SHAPE),
        2,
        "changes hidden states outside its layers.*use pp_size=1",
    ),
    "sizes for each layer": (
        lambda: transformers.Gemma4TextConfig(**SHAPE | TOKENS, vocab_size_per_layer_input=199),
        1,
        "must give one head_dim for all layers",
    ),
    "attention that cannot be replaced": (
        lambda: transformers.FalconConfig(vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        1,
        "accepts only its own attention",
    ),
    "parts that need one another": (
        lambda: transformers.Gemma3nTextConfig(
            **SHAPE | TOKENS | {"num_hidden_layers": 4}, hidden_size_per_layer_input=8, num_kv_shared_layers=0
        ),
        1,
        "cannot be built in part",
    ),
    "a window that attention is not told": (
        lambda: transformers.PhimoeConfig(**SHAPE | TOKENS, sliding_window=WINDOW, num_local_experts=2),
        1,
        f"a window layer must see {WINDOW} tokens",
    ),
    "no bound of positions": (
        lambda: transformers.BloomConfig(vocab_size=199, hidden_size=64, n_layer=2, n_head=4),
        1,
        "must give max_position_embeddings",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name_before_anything_is_served(kind: str, tmp_path: Path) -> None:
    """C11, A08: the reason, and what is served."""
    make, pp_size, text = REFUSED[kind]
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), pp_size=pp_size, device="cpu")
    with pytest.raises(CheckpointError, match=text) as refused:
        ChainedStages(config, limits_for(config, window=WINDOW if "window" in kind else 0), lean=False)
    assert "pp_size=1" in text or SERVED in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2_softcap"])
def test_attention_that_differs_from_the_architecture_s_own_is_found_at_the_start(
    family: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C11: any addition of an architecture to attention shows in its first tokens."""
    config = EngineConfig(model=str(checkpoint_of(family)), device="cpu")
    window = WINDOW if "gemma" in family else 0
    ChainedStages(config, limits_for(config, window=window))
    scoring = attention.Scoring
    monkeypatch.setattr(attention, "Scoring", lambda scale, *rest: scoring(scale * 1.5, *rest))
    with pytest.raises(CheckpointError, match="its own attention gives different states, by"):
        ChainedStages(config, limits_for(config, window=window))
