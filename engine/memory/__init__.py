"""The memory of the engine, as the scheduler sees it: pages of KV, rows, and the prefix tree over full pages.

Pure bookkeeping: the KV itself lives on the stages, at the page numbers that are handed out here.
"""

from engine.memory.audit import MemoryAudit
from engine.memory.kv import KVMemory, Lease
from engine.memory.pages import PagePool, PageState
from engine.memory.pressure import Pressure
from engine.memory.radix import Node, RadixTree
from engine.memory.rows import RowPool
from engine.memory.windows import Windows

__all__ = [
    "KVMemory",
    "Lease",
    "MemoryAudit",
    "Node",
    "PagePool",
    "PageState",
    "Pressure",
    "RadixTree",
    "RowPool",
    "Windows",
]
