"""The memory of the engine, as the scheduler sees it: pages of KV, rows, and the prefix tree over full pages.

Pure bookkeeping: the KV itself lives on the stages, at these page numbers.
"""

from engine.core.memory.cache_log import CacheLog
from engine.core.memory.host_tier import HostPage, HostTier
from engine.core.memory.kv import KVMemory
from engine.core.memory.lease import Lease
from engine.core.memory.node import PLAIN, KvKey, Node
from engine.core.memory.pages import PagePool, PageState
from engine.core.memory.radix import RadixTree
from engine.core.memory.sliding_window import SlidingWindowPool

__all__ = [
    "PLAIN",
    "CacheLog",
    "HostPage",
    "HostTier",
    "KVMemory",
    "KvKey",
    "Lease",
    "Node",
    "PagePool",
    "PageState",
    "RadixTree",
    "SlidingWindowPool",
]
