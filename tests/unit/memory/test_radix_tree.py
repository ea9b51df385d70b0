"""The prefix tree: matching by full pages, splitting, locks, hits, eviction of the least recently used."""

from __future__ import annotations

import pytest

from engine.core.errors import IntegrityError
from engine.core.memory import Node, PagePool, PageState, RadixTree
from engine.core.memory.integrity import check_pages, check_tree


class Forest:
    """A tree and its pool, used as requests do that come and go."""

    def __init__(self, pages: int = 16, page_size: int = 2) -> None:
        self.pool = PagePool(pages, page_size)
        self.tree = RadixTree(self.pool)

    def publish(self, text: str, *, counts: bool = True) -> Node:
        tokens = tuple(text.encode())
        pages = self.pool.allocate(len(tokens) // self.pool.page_size)
        node, _ = self.tree.publish(self.tree.root, tokens, pages, counts=counts)
        check_tree(self.tree, self.pool)
        check_pages(self.pool)
        self._use(node)
        return node

    def match(self, text: str) -> tuple[Node, list[int]]:
        node, pages = self.tree.match(tuple(text.encode()))
        self._use(node)
        return node, pages

    def _use(self, node: Node) -> None:
        self.tree.lock(node)
        self.tree.unlock(node)

    def texts(self) -> list[str]:
        return [bytes(node.tokens).decode() for node in self.tree.nodes()]


def test_match_ends_at_full_pages_and_splits_there() -> None:
    forest = Forest()
    forest.publish("aabbccdd")
    assert forest.tree.match_length(b"aabbcx") == 4
    assert forest.texts() == ["aabbccdd"], "asking for the length changes nothing"
    node, pages = forest.match("aabbcx")
    assert pages == [0, 1]
    assert node.pages == [0, 1]
    assert forest.texts() == ["aabb", "ccdd"]
    check_tree(forest.tree, forest.pool)


def test_split_copies_locks_and_hits_to_the_upper_half() -> None:
    forest = Forest()
    node = forest.publish("aabbccdd")
    forest.tree.lock(node)
    upper, _ = forest.match("aabb")
    assert (upper.lock_ref, upper.hit_count, node.lock_ref, node.hit_count) == (1, 1, 1, 1)
    assert forest.tree.locked_pages == 4
    forest.tree.unlock(node)
    assert forest.tree.locked_pages == 0


def test_pages_that_the_tree_has_already_go_back_to_the_pool() -> None:
    forest = Forest()
    forest.publish("aabb")
    node = forest.publish("aabbcc")
    assert (forest.pool.cached, forest.pool.held) == (3, 0)
    assert (node.pages, forest.pool.state(2)) == ([4], PageState.FREE)


def test_hits_are_counted_along_the_path() -> None:
    forest = Forest()
    forest.publish("aabb")
    forest.publish("aabbcc")
    forest.publish("aabbcc", counts=False)
    assert [(node.hit_count) for node in forest.tree.nodes()] == [2, 1]


def test_least_recently_used_leaf_goes_first() -> None:
    forest = Forest()
    for text in ("aaaa", "bbbb", "cccc"):
        forest.publish(text)
    forest.match("aaaa")
    assert forest.tree.evict(3) == 3
    assert forest.texts() == ["aaaa", "cc"], "bbbb whole, then the tail of cccc"
    check_tree(forest.tree, forest.pool)


def test_parent_goes_after_its_children() -> None:
    forest = Forest()
    forest.publish("aabb")
    forest.publish("aabbccdd")
    assert forest.tree.evict(3) == 3
    assert forest.texts() == ["aa"]


def test_locked_nodes_stay() -> None:
    forest = Forest()
    node = forest.publish("aabb")
    forest.publish("ccdd")
    forest.tree.lock(node)
    assert forest.tree.evictable_pages == 2
    assert forest.tree.evict(4) == 2
    assert forest.texts() == ["aabb"]
    forest.tree.unlock(node)
    assert forest.tree.evict(4) == 2


def test_node_of_another_tree_is_an_error() -> None:
    forest = Forest()
    node = forest.publish("aabb")
    forest.tree.reset()
    forest.pool.reset()
    for use in (forest.tree.lock, forest.tree.unlock):
        with pytest.raises(IntegrityError, match="This request holds the node from another tree"):
            use(node)


def test_unlocked_more_often_than_locked_is_an_error() -> None:
    forest = Forest()
    with pytest.raises(IntegrityError, match="unlocked more often"):
        forest.tree.unlock(forest.publish("aabb"))


def test_heap_of_evictable_leaves_stays_bounded() -> None:
    forest = Forest()
    node = forest.publish("aabb")
    for _ in range(1000):
        forest.tree.lock(node)
        forest.tree.unlock(node)
    assert len(forest.tree._heap) < 100
    assert forest.tree.evict(2) == 2


def test_leaves_are_found_after_the_heap_was_thinned() -> None:
    """Every evictable page can be evicted, the least recently used first, however often another leaf was used."""
    forest = Forest()
    forest.publish("aabb")
    upper = forest.publish("ccdd")
    forest.publish("ccddee")
    forest.publish("ffgg")
    forest.tree.lock(upper)
    for _ in range(100):
        forest.match("aabb")
    assert forest.tree.evict(1) == 1
    assert forest.texts() == ["aabb", "ccdd", "ffgg"]
    assert forest.tree.evict(16) == 4
    assert forest.texts() == ["ccdd"]
    forest.tree.unlock(upper)
    assert forest.tree.evict(16) == 2


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda node: setattr(node, "lock_ref", 1), r"\(2, 2, 1\), but \(2, 0, 1\) are booked"),
        (lambda node: node.pages.append(9), "4 tokens in 3 pages"),
        (lambda node: setattr(node, "pages", [14, 15]), "not CACHED"),
        (lambda node: setattr(node, "tokens", (1, 2, 3, 4)), "not a child"),
    ],
)
def test_broken_node_is_found(break_it: object, text: str) -> None:
    forest = Forest()
    break_it(forest.publish("aabb"))
    with pytest.raises(IntegrityError, match=text):
        check_tree(forest.tree, forest.pool)
