"""The policy ``dfs-weight``: prompts that share a cached prefix go one after another, the largest group first.

A walk through the prefix tree, depth first, by weight. It orders; it never admits.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory import KVMemory
from engine.scheduler.request import Request

_Key = list[tuple[int, int, int]]


def depth_first(waiting: Sequence[Request], memory: KVMemory) -> list[Request]:
    """The requests, given in order of arrival, in the order of the walk.

    A node weighs as much as requests hit it. Of its children the heaviest comes first, of equal ones that of the
    earliest request. What hits a longer part of a prefix comes before what ends there; what hits nothing comes last.
    """
    hits = {one: memory.cached_nodes(one.ids, one.hit_limit_tokens, one.kv_key) for one in waiting}
    weight: dict[int, int] = {}
    first: dict[int, int] = {}
    for one, nodes in hits.items():
        for node, _ in nodes:
            weight[node] = weight.get(node, 0) + 1
            first.setdefault(node, one.arrival)

    def key(one: Request) -> _Key:
        nodes = hits[one]
        # No node weighs nothing, so a walk that goes on sorts before one that ends.
        end = 0, -sum([pages for _, pages in nodes]), one.arrival
        return [*[(-weight[node], first[node], 0) for node, _ in nodes], end]

    return sorted(waiting, key=key)
