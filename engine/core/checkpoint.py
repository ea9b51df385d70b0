"""The whole state of a fully idle scheduler, as plain data, with which a recording may begin."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from engine.core.memory import PLAIN, KvKey
from engine.core.messages import Grammar
from engine.core.stats import EngineStats


class CachedRun(msgspec.Struct, frozen=True, array_like=True):
    """One node: ``tokens`` are the token ids of its own pages, ``parent`` is the id of the node above it."""

    id: int
    parent: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    hit_count: int
    last_used: int
    kv_key: KvKey = PLAIN


class TreeSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``runs`` are all nodes but the root, parents before children, siblings in order of insertion."""

    root: int
    generation: int
    next_id: int
    tick: int
    runs: tuple[CachedRun, ...]


class LoraState(msgspec.Struct, frozen=True, array_like=True):
    name: str
    path: str
    version: int
    used: int


class KeptPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of the host tier; with a ``source`` its copy from that page is still due."""

    number: int
    key: bytes
    source: int | None


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="checkpoint"):
    """A scheduler after step ``stats.step``; ``now`` is in seconds. Rows and pages outside the tree are free.

    ``window`` pairs each page of the tree that has a window page with that page, in the order of eviction. ``grammars``
    are the kept grammars with their ids, and whether each is compiled; later grammars get ids above ``last_grammar``.
    ``host`` are the pages of the host tier. ``weights`` is ``Books.weights``, ``transfers`` the number of transfers
    begun, and ``seconds_per_token``, ``decode_seconds`` and ``decode_tokens`` the measurements of ``GapBound``.
    """

    now: float
    stats: EngineStats
    tree: TreeSnapshot
    window: tuple[tuple[int, int], ...] = ()
    last_grammar: int = 0
    grammars: tuple[tuple[int, Grammar, bool], ...] = ()
    loras: tuple[LoraState, ...] = ()
    host: tuple[KeptPage, ...] = ()
    weights: str = ""
    transfers: int = 0
    seconds_per_token: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: float = 0.0


class CheckpointParts(TypedDict, total=False):
    """The fields of a checkpoint that belong to features of the scheduler."""

    window: tuple[tuple[int, int], ...]
    last_grammar: int
    grammars: tuple[tuple[int, Grammar, bool], ...]
    loras: tuple[LoraState, ...]
    host: tuple[KeptPage, ...]
    weights: str
    transfers: int
    seconds_per_token: float
    decode_seconds: float
    decode_tokens: float
