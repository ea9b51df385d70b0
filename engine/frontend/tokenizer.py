"""The checkpoint's tokenizer: text to token ids and back, and the chat template that comes with it.

Owns loading them. Stateless for requests; a stream's state is its detokenizer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.frontend.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    """The fast tokenizer of the configured model and its chat template.

    Raises CheckpointError when the folder has no tokenizer that works.
    """
    # Seconds of import, which the supervisor did before the fork.
    from transformers import AutoTokenizer

    from engine.model.checkpoint import require_trust, resolve_folder

    folder = resolve_folder(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as exc:  # tokenizers raises plain Exceptions, and transformers many unrelated types
        require_trust(folder, exc, trust_remote_code=config.trust_remote_code)
        raise CheckpointError(f"{folder} must hold a tokenizer that transformers can load, but: {exc}") from exc
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"{folder} must hold a fast tokenizer, got a {type(tokenizer).__name__}; convert it to tokenizer.json"
        )
    return backend, ChatTemplate(tokenizer)
