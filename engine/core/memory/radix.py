"""The prefix tree: a radix tree over full pages of tokens, with lock refs, hit counts and LRU eviction.

It owns the pages that it caches. It never frees a locked node. A request locks the node of its matched prefix at
admission, publishes confirmed pages, and unlocks when its memory is released.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from engine.core.errors import IntegrityError
from engine.core.memory.cache_log import CacheLog
from engine.core.memory.host_tier import HostTier
from engine.core.memory.node import PLAIN, KvKey, Node
from engine.core.memory.pages import PagePool
from engine.core.memory.sliding_window import SlidingWindowPool

# The eviction heap is rebuilt when stale entries outnumber the nodes by this factor, so that it stays O(nodes), and
# exceed a fraction of the pages, so that a small tree is not rebuilt too often.
_STALE_HEAP_FACTOR: Final = 4
_PAGES_PER_STALE_ENTRY: Final = 16


class RadixTree:
    """The tree over the pages of one pool. Children are keyed by their ``kv_key`` and their first page of tokens: KV of
    one key is never a prefix of KV of another.

    ``root`` is empty, the prefix of requests without a match. The caller locks the nodes that ``match`` and ``publish``
    return: a leaf can be evicted once its last lock is released.
    """

    def __init__(
        self, pool: PagePool, sliding_window: SlidingWindowPool | None = None, host: HostTier | None = None
    ) -> None:
        self._pool = pool
        self._sliding_window = sliding_window
        self._host = host
        self.log: CacheLog | None = None
        self._page_size = pool.page_size
        self._most_stale = pool.total // _PAGES_PER_STALE_ENTRY
        self.generation = 0
        self.next_id = 0
        self.tick = 0
        self.node_count: int
        self._start_over()

    # -- looking up --

    def match_length(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> int:
        """Return the tokens of the longest cached prefix, in full pages. Changes nothing."""
        return sum([shared for _, shared in self._walk(self.root, tokens, 0, kv_key)]) * self._page_size

    def match_nodes(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> list[tuple[int, int]]:
        """Return the ids of the nodes of the longest cached prefix, each with its matching pages. Changes nothing."""
        return [(node.id, shared) for node, shared in self._walk(self.root, tokens, 0, kv_key)]

    def match_pages(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> list[int]:
        """Return the pages of the longest cached prefix. Changes nothing."""
        return [page for node, shared in self._walk(self.root, tokens, 0, kv_key) for page in node.pages[:shared]]

    def match(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> tuple[Node, list[int]]:
        """Return the last node and the pages of the longest cached prefix; splits a node to end there."""
        node, pages = self.root, []
        for child, shared in list(self._walk(self.root, tokens, 0, kv_key)):
            node = child if shared == len(child.pages) else self._split(child, shared)
            pages += node.pages
            self.tick += 1
            node.last_used = self.tick
        return node, pages

    def lock(self, node: Node) -> None:
        """Protect a node and its ancestors from eviction for one request."""
        self.check_own(node)
        while node.parent is not None:
            if node.lock_ref == 0:
                self.locked_pages += len(node.pages)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        self.check_own(node)
        while node.parent is not None:
            if node.lock_ref < 1:
                raise IntegrityError(f"node {node.id} is unlocked more often than it was locked")
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.locked_pages -= len(node.pages)
                self._offer_for_eviction(node)
            node = node.parent

    # -- publishing --

    def publish(
        self, node: Node, tokens: Sequence[int], pages: Sequence[int], *, counts: bool, kv_key: KvKey = PLAIN
    ) -> tuple[Node, list[int]]:
        """Add full pages below ``node``: ``tokens`` are the ids after the node's prefix, ``pages`` their pages.

        Frees pages whose tokens the tree already has. Returns the deepest node and the tree's pages of ``tokens``. With
        ``counts`` the whole path gets a hit.
        """
        self.check_own(node)
        result: list[int] = []
        for child, shared in list(self._walk(node, tokens, 0, kv_key)):
            node = child if shared == len(child.pages) else self._split(child, shared)
            self._pool.release(pages[len(result) : len(result) + shared])
            result += node.pages
        if len(result) < len(pages):
            rest = tuple(tokens[len(result) * self._page_size :])
            node = self._add_leaf(node, rest, list(pages[len(result) :]), kv_key)
            result += node.pages
        self._touch_path(node, counts=counts)
        return node, result

    # -- evicting --

    @property
    def evictable_pages(self) -> int:
        """Pages in unlocked nodes."""
        return self._pool.cached - self.locked_pages

    def evict(self, count: int) -> int:
        """Free ``count`` pages, least recently used leaves first, tails of nodes first. Returns the number freed."""
        freed = 0
        while freed < count and (node := self._least_recently_used()) is not None:
            take = min(count - freed, len(node.pages))
            pages = node.pages[len(node.pages) - take :]
            if self._sliding_window is not None:
                self._sliding_window.drop(pages)
            if self._host is not None:
                self._host.keep(self._tokens_to(node), pages, node.kv_key)
            self._pool.evict(pages)
            if self.log is not None:
                self.log.removed(pages)
            freed += take
            self._truncate(node, len(node.pages) - take)
        return freed

    def reset(self) -> None:
        """Drop every node. Requires a quiescent engine, and a reset of the pool too."""
        self.generation += 1
        self._start_over()

    # -- the whole tree --

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before children, in order of insertion."""
        stack = [*reversed(self.root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack += reversed(node.children.values())

    def offered(self) -> set[Node]:
        """Return the nodes that the heap offers for eviction, by their last use."""
        return {node for last_used, _, node in self._heap if node.last_used == last_used}

    def path(self, node: Node) -> Iterator[Node]:
        """Yield a node and its ancestors without the root."""
        step = node
        while step.parent is not None:
            yield step
            step = step.parent

    def check_own(self, node: Node) -> None:
        """Raise IntegrityError if the node belongs to a tree before the last reset."""
        if node.generation != self.generation:
            raise IntegrityError(
                f"This request holds the node from another tree: node {node.id} is of tree generation "
                f"{node.generation}, the tree is of generation {self.generation}; it was reset while the request "
                "was alive"
            )

    def become(self, root: Node, nodes: Sequence[Node], *, next_id: int, tick: int) -> None:
        """Restore these unlocked nodes, parents before children, into an empty tree.

        The pool already has their pages as cached.
        """
        assert not self.node_count, f"a tree of {self.node_count} nodes cannot become another one"
        self.generation, self.next_id, self.tick, self.root = root.generation, next_id, tick, root
        self.node_count = len(nodes)
        for node in nodes:
            self._note_stored(node)
            self._offer_for_eviction(node)
        if self.log is not None:
            self.log.take()  # the log had these pages before the checkpoint

    # -- inside --

    def _start_over(self) -> None:
        self.root = Node(self._new_id(), self.generation, (), [], None)
        self._heap: list[tuple[int, int, Node]] = []
        self.locked_pages = 0
        self.node_count = 0

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _walk(self, node: Node, tokens: Sequence[int], start: int, kv_key: KvKey) -> Iterator[tuple[Node, int]]:
        """Yield the matching children along ``tokens[start:]``, each with the number of its matching pages."""
        size = self._page_size
        while len(tokens) - start >= size:
            key = tuple(tokens[start : start + size])
            child = node.children.get((*kv_key, *key) if kv_key != PLAIN else key)
            if child is None:
                return
            shared = self._shared_pages(child, tokens, start)
            yield child, shared
            if shared < len(child.pages):
                return
            node, start = child, start + shared * size

    def _shared_pages(self, child: Node, tokens: Sequence[int], start: int) -> int:
        size = self._page_size
        most = min(len(child.pages), (len(tokens) - start) // size)
        if tuple(tokens[start : start + most * size]) == child.tokens[: most * size]:
            return most
        shared = 1  # The first page matched: it is the key.
        while (
            tuple(tokens[start + shared * size : start + (shared + 1) * size])
            == child.tokens[shared * size : (shared + 1) * size]
        ):
            shared += 1
        return shared

    def _tokens_to(self, node: Node) -> list[int]:
        """Return all tokens of a prefix up to the end of this node."""
        return [token for step in reversed(list(self.path(node))) for token in step.tokens]

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a node after ``pages`` pages and return the new upper half; the lower half keeps its identity."""
        size, parent = self._page_size, node.parent
        assert parent is not None
        upper = Node(self._new_id(), self.generation, node.tokens[: pages * size], node.pages[:pages], parent)
        upper.lock_ref, upper.hit_count, upper.last_used = node.lock_ref, node.hit_count, node.last_used
        upper.kv_key = node.kv_key
        parent.children[upper.key(size)] = upper
        node.tokens, node.pages, node.parent = node.tokens[pages * size :], node.pages[pages:], upper
        upper.children[node.key(size)] = node
        self.node_count += 1
        return upper

    def _add_leaf(self, parent: Node, tokens: tuple[int, ...], pages: list[int], kv_key: KvKey) -> Node:
        self._pool.cache(pages)
        leaf = Node(self._new_id(), self.generation, tokens, pages, parent, kv_key=kv_key)
        parent.children[leaf.key(self._page_size)] = leaf
        self.node_count += 1
        self._note_stored(leaf)
        return leaf

    def _note_stored(self, node: Node) -> None:
        if self.log is not None:
            before = node.parent.pages[-1:] if node.parent is not None else ()
            self.log.stored(before[0] if before else None, node.tokens, node.pages, node.kv_key)

    def _touch_path(self, node: Node, *, counts: bool) -> None:
        """Mark a published path as used now, deepest first, so that its deepest leaf is evicted first."""
        self.tick += 1
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.last_used = self.tick
            if counts:
                step.hit_count += 1
            step = step.parent

    def _offer_for_eviction(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._heap, (node.last_used, node.id, node))
        if len(self._heap) > _STALE_HEAP_FACTOR * self.node_count + self._most_stale:
            leaves = [leaf for leaf in self.nodes() if not leaf.children and leaf.lock_ref == 0]
            self._heap = sorted((leaf.last_used, leaf.id, leaf) for leaf in leaves)

    def _least_recently_used(self) -> Node | None:
        """Return the unlocked leaf to evict next; drops stale entries of the heap."""
        while self._heap:
            last_used, _, node = self._heap[0]
            if node.pages and not node.children and node.lock_ref == 0 and node.last_used == last_used:
                return node
            heapq.heappop(self._heap)
        return None

    def _truncate(self, leaf: Node, pages: int) -> None:
        key, parent = leaf.key(self._page_size), leaf.parent
        leaf.tokens, leaf.pages = leaf.tokens[: pages * self._page_size], leaf.pages[:pages]
        if pages:
            return
        assert parent is not None
        del parent.children[key]
        self.node_count -= 1
        self._offer_for_eviction(parent)
