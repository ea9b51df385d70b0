"""Routing of requests to replicas: a pure, deterministic policy over prefixes and loads, in virtual time too.

Owns a router's knowledge of its replicas. Never calls a replica: the caller reports loads and gives the seed.
"""
