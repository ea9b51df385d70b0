"""Checks the memory: every page, row and lock has one owner, and every booked sum is right.

The checks change nothing and raise an IntegrityError that names the first mismatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.errors import IntegrityError
from engine.core.memory import PLAIN, HostTier, KVMemory, Lease, Node, PagePool, RadixTree, SlidingWindowPool
from engine.core.memory.pages import CACHED, HELD
from engine.core.memory.sliding_window import NO_WINDOW_PAGE


def check_memory(memory: KVMemory, leases: Sequence[Lease], pins: Iterable[Node] = ()) -> None:
    """Check pools and tree against all live ``leases`` and the ``pins``, nodes that an operator locks."""
    pages, rows, tree = memory.pages, memory.rows, memory.tree
    locks: dict[Node, int] = {}
    held: list[int] = []
    owned_rows: set[int] = set()
    for lease in leases:
        _check_lease(memory, lease, locks)
        held += lease.pages[lease.cached_pages :]
        owned_rows.add(lease.row)
    for pin in pins:
        for node in tree.path(pin):
            locks[node] = locks.get(node, 0) + 1
    check_pages(pages)
    check_pages(rows)
    check_tree(tree, pages, locks)
    if len(held) != pages.held or len(set(held)) != len(held):
        raise IntegrityError(f"leases hold pages {sorted(held)}, but {pages.held} pages are booked as held")
    if not pages.all_are(HELD, held):
        raise IntegrityError(f"leases hold pages {sorted(held)}, but some of these are not HELD")
    if len(owned_rows) != len(leases) or len(leases) != rows.held:
        raise IntegrityError(f"leases own rows {[lease.row for lease in leases]}, but {rows.held} rows are taken")
    if memory.sliding_window is not None:
        check_window(memory.sliding_window, tree, leases)


def check_pages(pages: PagePool) -> None:
    """Check the booked free, held, cached and reserved pages against a count, and their sum."""
    counted, booked = pages.counted(), (pages.free, pages.held, pages.cached, pages.reserved)
    if counted != booked or sum(counted) != pages.total:
        raise IntegrityError(
            f"{pages.unit} counts (free, held, cached, reserved) are booked as {booked}, "
            f"but the {pages.unit}s say {counted} of {pages.total}"
        )
    if pages.hides_free:
        raise IntegrityError(f"of {pages}, a {pages.unit} that is free is below the first one that is looked at")


def check_tree(tree: RadixTree, pages: PagePool, locks: dict[Node, int] | None = None) -> None:
    """Check that every page of the tree is cached and in one node, and that ``locks``, if given, are all its locks.

    The eviction heap offers each unlocked leaf.
    """
    size, locked = pages.page_size, 0
    nodes = list(tree.nodes()) if tree.root.children else []
    owned: list[int] = []
    # Computed for the first node that needs it: usually all leaves are locked.
    offered: set[Node] | None = None
    for node in nodes:
        _check_node(node, size)
        lock_ref = node.lock_ref
        if locks is not None and lock_ref != locks.get(node, 0):
            raise IntegrityError(f"node {node.id} has lock_ref {lock_ref}, but {locks.get(node, 0)} leases protect it")
        owned += node.pages
        if lock_ref:
            locked += len(node.pages)
        elif locks is not None and not node.children:
            offered = tree.offered() if offered is None else offered
            if node not in offered:
                raise IntegrityError(f"{node} is an unlocked leaf, but it is not offered for eviction")
    if len(set(owned)) != len(owned) or not pages.all_are(CACHED, owned):
        raise IntegrityError(_first_bad_node(nodes, pages))
    if (len(owned), locked, len(nodes)) != (pages.cached, tree.locked_pages, tree.node_count):
        sums, booked = (len(owned), locked, len(nodes)), (pages.cached, tree.locked_pages, tree.node_count)
        raise IntegrityError(f"the tree has (pages, locked pages, nodes) {sums}, but {booked} are booked")


def check_window(window: SlidingWindowPool, tree: RadixTree, leases: Sequence[Lease]) -> None:
    """Check that every used window page belongs to one page and has the same owner as that page."""
    check_pages(window.pages)
    taken = len(window.beside) - window.beside.count(NO_WINDOW_PAGE)
    different = len({NO_WINDOW_PAGE, *window.beside}) - 1
    if different != taken or taken != window.pages.held + window.pages.cached:
        beside = sorted(window_page for window_page in window.beside if window_page != NO_WINDOW_PAGE)
        raise IntegrityError(f"the window pages {beside} belong to pages, but {window.pages} is booked")
    users: dict[int, int] = {}
    held = 0
    for lease in leases:
        shared, own = _check_window_of(window, lease)
        held += len(own)
        for window_page in shared:
            users[window_page] = users.get(window_page, 0) + 1
    for window_page, count in users.items():
        if window.users[window_page] != count:
            raise IntegrityError(
                f"window page {window_page} has {window.users[window_page]} users, but {count} leases use it"
            )
    for node in tree.nodes():
        _check_window_pages(window, node.pages)
    if (held, len(users) + len(window.idle)) != (window.pages.held, window.pages.cached):
        raise IntegrityError(
            f"leases hold {held} window pages and use {len(users)} of the tree's, {len(window.idle)} are idle, but "
            f"{window.pages} is booked"
        )


def check_host(host: HostTier, written: Sequence[int], read: Sequence[int]) -> None:
    """Check that every used host page has one key, and is ready unless a copy to it is due or in flight.

    Copies in flight write the pages ``written`` and read the pages ``read``, with one entry for each copy.
    """
    check_pages(host.pages)
    kept = list(host.kept.values())
    numbers = [page.number for page in kept]
    if len(set(numbers)) != len(numbers) or len(numbers) != host.pages.total - host.pages.free:
        raise IntegrityError(f"host pages {sorted(numbers)} have a key, but {host.pages} is booked")
    readers: dict[int, int] = {}
    for number in (*read, *[number for number, _ in host.due_in]):
        readers[number] = readers.get(number, 0) + 1
    unwritten = sorted([page.number for page in kept if not page.is_ready and page.source is None])
    if unwritten != sorted(written):
        raise IntegrityError(f"host pages {unwritten} wait for their copies, but the copies in flight write {written}")
    for page in kept:
        if page.readers != readers.pop(page.number, 0):
            raise IntegrityError(
                f"host page {page.number} counts {page.readers} readers, which are not the copies that read it"
            )
        if host.page_numbered(page.number) is not page:
            raise IntegrityError(f"{page} is not the host page with its number")
        state = host.pages.state(page.number)
        if state is not (CACHED if page.is_ready else HELD) or (page.is_ready and page.source is not None):
            raise IntegrityError(f"{page} is booked as {state.name}")
    due_out = sorted([page.number for page in kept if page.source is not None])
    if due_out != sorted(host.due_out):
        raise IntegrityError(f"host pages {due_out} wait for a microbatch to write them, but {host.due_out} are due")
    if readers:
        raise IntegrityError(f"host pages {sorted(readers)} are read by copies, but are not in use")


def _check_lease(memory: KVMemory, lease: Lease, locks: dict[Node, int]) -> None:
    """Check that a lease has a row, and the cached pages of its node's path, which it locks."""
    pages, above, node = lease.pages, lease.cached_pages, lease.node
    if node.generation != memory.tree.generation:
        memory.tree.check_own(node)
    while (parent := node.parent) is not None:
        before = above - len(node.pages)
        if pages[before:above] != node.pages:
            raise IntegrityError(f"{lease} does not use the pages of its prefix: node {node.id} has {node.pages}")
        above = before
        locks[node] = locks.get(node, 0) + 1
        node = parent
    if above:
        raise IntegrityError(f"{lease} counts {above} more cached pages than its prefix has")
    if lease.released or memory.rows.state(lease.row) is not HELD:
        raise IntegrityError(f"{lease} owns row {lease.row}, which is free")


def _check_node(node: Node, page_size: int) -> None:
    """Check one node: its parent, the size of its run, and that its parent has at least as many locks."""
    parent, tokens, pages = node.parent, node.tokens, node.pages
    key = node.key(page_size) if node.kv_key != PLAIN else tokens[:page_size]
    if parent is None or parent.children.get(key) is not node:
        raise IntegrityError(f"{node} is not a child of {parent}")
    if node.kv_key != parent.kv_key and parent.parent is not None:
        raise IntegrityError(f"node {node.id} has the KV key {node.kv_key}, but its parent has {parent.kv_key}")
    if node.lock_ref > parent.lock_ref and parent.parent is not None:
        raise IntegrityError(f"node {node.id} has {node.lock_ref} locks, but its parent has {parent.lock_ref}")
    if len(tokens) != len(pages) * page_size or not pages:
        raise IntegrityError(f"node {node.id} has {len(tokens)} tokens in {len(pages)} pages")


def _first_bad_node(nodes: Iterable[Node], pages: PagePool) -> str:
    seen: set[int] = set()
    for node in nodes:
        if not pages.all_are(CACHED, node.pages):
            return f"node {node.id} has pages {node.pages}, but some of these are not CACHED"
        if not seen.isdisjoint(node.pages):
            break
        seen.update(node.pages)
    return f"node {node.id} has pages {node.pages}, but another node has some of these too"


def _check_window_of(window: SlidingWindowPool, lease: Lease) -> tuple[list[int], list[int]]:
    """Check the window pages of one lease: present from its window on, with the same owners as its pages, and released
    before.
    """
    start, cached, beside = lease.window_start, lease.cached_pages, window.beside
    pages = [beside[page] for page in lease.pages]
    shared, own, given_back = pages[start:cached], pages[max(start, cached) :], pages[cached:start]
    if NO_WINDOW_PAGE in shared or NO_WINDOW_PAGE in own or given_back.count(NO_WINDOW_PAGE) != len(given_back):
        raise IntegrityError(
            f"{lease} has window pages {pages}, but must have all from index {start} on and none before"
        )
    if not window.pages.all_are(CACHED, shared) or not window.pages.all_are(HELD, own):
        raise IntegrityError(
            f"{lease} uses window pages {shared} of the tree and {own} of its own, but the pool's books differ"
        )
    return shared, own


def _check_window_pages(window: SlidingWindowPool, pages: Sequence[int]) -> None:
    """Check that the tree owns the window pages of a node, idle exactly while no lease uses them."""
    beside, idle, users, state = window.beside, window.idle, window.users, window.pages.state
    for page in pages:
        window_page = beside[page]
        if window_page == NO_WINDOW_PAGE:
            continue
        if state(window_page) is not CACHED or (page in idle) is (users[window_page] > 0):
            raise IntegrityError(
                f"window page {window_page} beside page {page} of the tree is {state(window_page).name} with "
                f"{users[window_page]} users, {'idle' if page in idle else 'not idle'}"
            )
