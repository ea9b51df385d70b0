"""A tokenizer of one token a byte, as the embedded model's."""

from __future__ import annotations

from typing import Any


class ByteTokenizer:
    """Decodes as tokenizers do, with replacements."""

    class Encoding:
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        return self.Encoding(list(text.encode()))

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def get_vocab(self) -> dict[str, int]:
        return {self.id_to_token(token_id): token_id for token_id in range(256)}

    def id_to_token(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"

    def token_to_id(self, token: str) -> int | None:
        return None

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")
