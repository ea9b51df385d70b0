"""Routing of requests to replicas: a pure, deterministic policy over prefixes and loads, which also runs in virtual
time.

Owns a router's view of its replicas. Never calls a replica: the caller reports loads and supplies the seed.
"""
