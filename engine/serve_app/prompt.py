"""The prompt in a request's body, as far as a router must know it: what tells two prompts' beginnings apart.

Refuses nothing: a body that it does not understand has no prefix, and the engine says what is wrong with it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from engine.frontend.routes.generation import GENERATING
from engine.routing import NO_PROMPT, Prompt, chunk_hashes

# A guess that holds for most tokenizers and texts; it only weighs prompts against one another.
BYTES_A_TOKEN: Final = 4
_ENCODER: Final = msgspec.json.Encoder()


def prompt_in(path: str, body: bytes, chunk_bytes: int) -> Prompt:
    """The prompt in a body by its text: the chunks are of bytes, and the tokens a guess. Empty where there is none."""
    if path not in GENERATING:
        return NO_PROMPT
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_PROMPT
    if not isinstance(fields, dict):
        return NO_PROMPT
    text = _prompt(fields)
    # A LoRA's KV is its own, and so are another model's and that of another cache salt.
    namespace = _text([fields.get(name) for name in ("model", "lora_path", "cache_salt")])
    return Prompt(
        chain=chunk_hashes(text, chunk_bytes, namespace),
        tokens=len(text) // BYTES_A_TOKEN,
        tokens_a_chunk=max(1, chunk_bytes // BYTES_A_TOKEN),
    )


def _prompt(fields: dict[str, Any]) -> bytes:
    said = fields.get("messages", fields.get("input"))
    if said is not None:
        # Templates put the tools first. Each message is a text of its own, so that one more changes none before it.
        parts = [fields.get("tools"), fields.get("system"), fields.get("instructions")]
        return b"".join(map(_text, [*parts, *(said if isinstance(said, list) else (said,))]))
    for name in ("text", "prompt", "input_ids"):
        if fields.get(name):
            return _text(fields[name])
    return b""


def _text(value: object) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _ENCODER.encode(value)
