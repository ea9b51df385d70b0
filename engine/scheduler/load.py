"""The load of an engine, as a router asks for it: what is still to be computed before the requests here can decode.

Counted when it is asked for, from the books and the prefix tree, so that no event can make it drift. It only looks.
"""

from __future__ import annotations

from engine.memory import KVMemory
from engine.scheduler.books import Books


def pending_prefill_tokens(books: Books, memory: KVMemory) -> int:
    """Tokens that must still be launched before every request decodes; what the cache could serve now is not counted.

    Of a request that was sent back to the queue its output counts as well: it is computed again with the prompt.
    """
    chunked = books.chunked
    rest = 0 if chunked is None else chunked.prefill_tokens - chunked.planned_tokens
    rest += sum([one.prefill_tokens - one.planned_tokens for one in books.transferring.values()])
    if not books.waiting:
        return rest
    return rest + sum(
        [len(one.ids) - memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key) for one in books.waiting]
    )
