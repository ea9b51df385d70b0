"""Which replica a request goes to: a pure policy over prefixes and loads, deterministic and in virtual time too.

Owns what a router knows of its replicas. Never asks a replica: its caller reports loads and gives the seed.
"""
