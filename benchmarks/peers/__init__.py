"""Comparison of this server with others on one checkpoint and one machine. ``python -m benchmarks.peers --help``.

All get the same requests in turns, and are compared within each round.
"""
