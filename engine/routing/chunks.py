"""A prompt as a chain of hashes: one for each full chunk, and each stands for all of the prompt up to its end.

Owns the hash. It is the same in every process, so routers on different machines speak of the same prefixes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

# Later chunks are not hashed: a common prefix of this length decides the choice anyway.
MAX_CHUNKS: Final = 512
_HASH_BYTES: Final = 8


def chunk_hashes(prompt: bytes, chunk_bytes: int, namespace: bytes = b"") -> tuple[int, ...]:
    """The chain of a prompt. Prompts of different namespaces (a model, a LoRA) share no prefix.

    The rest that is shorter than a chunk has no hash.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    before = blake2b(namespace, digest_size=_HASH_BYTES).digest()
    chain: list[int] = []
    for end in range(chunk_bytes, min(len(prompt), MAX_CHUNKS * chunk_bytes) + 1, chunk_bytes):
        before = blake2b(before + prompt[end - chunk_bytes : end], digest_size=_HASH_BYTES).digest()
        chain.append(int.from_bytes(before, "big"))
    return tuple(chain)
