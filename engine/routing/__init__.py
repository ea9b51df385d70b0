"""Which replica a request goes to: a pure policy over prefixes and loads, deterministic and in virtual time too.

Owns what a router knows of its replicas. Never asks a replica: its caller reports loads and gives the seed.
"""

from __future__ import annotations

from engine.routing.fleet import Fleet, ReplicaLoad
from engine.routing.index import MAX_CHUNKS, PrefixIndex, chunk_hashes
from engine.routing.picture import Batch, CachePicture, FollowedCache
from engine.routing.placement import NO_PROMPT, Placement, Prompt, Ticket
from engine.routing.policy import Choice, Refused, Rules, choose

__all__ = [
    "MAX_CHUNKS",
    "NO_PROMPT",
    "Batch",
    "CachePicture",
    "Choice",
    "Fleet",
    "FollowedCache",
    "Placement",
    "PrefixIndex",
    "Prompt",
    "Refused",
    "ReplicaLoad",
    "Rules",
    "Ticket",
    "choose",
    "chunk_hashes",
]
