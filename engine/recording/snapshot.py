"""The cache as plain data: a prefix tree, its window pages and the second tier while no request owns memory.

Owns the types, and what makes one of a memory or a memory of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.errors import IntegrityError
from engine.memory import HostPage, HostTier, KVMemory, Node, SlidingWindowPool


class CachedRun(msgspec.Struct, frozen=True, array_like=True):
    """One node: ``tokens`` are the ids of its own pages, ``parent`` is the id of the node that they continue."""

    id: int
    parent: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    hit_count: int
    last_used: int
    lora: int = 0


class TreeSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``runs`` are all nodes but the root, parents before children, siblings in order of insertion."""

    root: int
    generation: int
    next_id: int
    tick: int
    runs: tuple[CachedRun, ...]


def tree_snapshot(memory: KVMemory) -> TreeSnapshot:
    """What the tree is; locks are not in it. Tokens are shared, not copied."""
    tree, runs = memory.tree, []
    for node in tree.nodes():
        assert node.parent is not None
        place = node.id, node.parent.id
        runs.append(CachedRun(*place, node.tokens, tuple(node.pages), node.hit_count, node.last_used, node.lora))
    return TreeSnapshot(
        root=tree.root.id, generation=tree.generation, next_id=tree.next_id, tick=tree.tick, runs=tuple(runs)
    )


def restore_tree(memory: KVMemory, snapshot: TreeSnapshot) -> None:
    """Make the tree of an empty memory what a snapshot says, without locks. Raises IntegrityError for a damaged one."""
    assert not memory.pages.cached, f"a tree with pages of {memory.pages} cannot become another one"
    root = Node(snapshot.root, snapshot.generation, (), [], None)
    nodes = {root.id: root}
    for run in snapshot.runs:
        if run.parent not in nodes:
            raise IntegrityError(f"node {run.id} continues node {run.parent}, which a snapshot must name before it")
        memory.pages.hold(run.pages)
        memory.pages.cache(run.pages)
        parent = nodes[run.parent]
        node = nodes[run.id] = Node(run.id, snapshot.generation, run.tokens, list(run.pages), parent, lora=run.lora)
        parent.children[node.key(memory.pages.page_size)] = node
        node.hit_count, node.last_used = run.hit_count, run.last_used
    memory.tree.become(root, [*nodes.values()][1:], next_id=snapshot.next_id, tick=snapshot.tick)


def window_snapshot(window: SlidingWindowPool) -> tuple[tuple[int, int], ...]:
    """Every page with a window page, and that, in the order of eviction; only while no lease uses one."""
    return tuple([(page, window.beside[page]) for page in window.idle])


class KeptPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of the second tier; with a ``source`` it is still to be copied from that page."""

    number: int
    key: bytes
    source: int | None


def host_snapshot(host: HostTier) -> tuple[KeptPage, ...]:
    """Every page in use, least recently used first; only while no copy is in flight."""
    return tuple([KeptPage(page.number, page.key, page.source) for page in host.kept.values()])


def restore_host(host: HostTier, pages: Sequence[KeptPage]) -> None:
    """Make an empty second tier what a snapshot says."""
    host.become([HostPage(one.number, one.key, one.source, is_ready=one.source is None) for one in pages])
