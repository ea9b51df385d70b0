"""Which replica a request goes to: a pure policy over prefixes and loads, deterministic and in virtual time too.

Owns what a router knows of its replicas. Never asks a replica: its caller reports loads and gives the seed.
"""

from __future__ import annotations

from engine.routing.fleet import Fleet, ReplicaLoad
from engine.routing.index import MAX_CHUNKS, PrefixIndex, chunk_hashes
from engine.routing.picture import CachePicture
from engine.routing.policy import Choice, Refused, Rules, choose
from engine.routing.router import PrefixRouter, Ticket

__all__ = [
    "MAX_CHUNKS",
    "CachePicture",
    "Choice",
    "Fleet",
    "PrefixIndex",
    "PrefixRouter",
    "Refused",
    "ReplicaLoad",
    "Rules",
    "Ticket",
    "choose",
    "chunk_hashes",
]
